-- Shows the newest fence that a gate knows.
-- Guarantee: writes nothing.
-- KEYS[1] -> the gate                      (string) the newest fence that wrote
-- KEYS[2] -> fifo:{NAME}:lock, if bound    (string) the record of the lock
-- ARGV[1] -> '1' if the gate is bound to a lock
-- Returns {newest or '0'}
return {newest()}
