-- Takes away exactly the lease that an operator saw, and grants the next ticket.
-- Guarantee: a lease with another fence is not touched; the holder's next renewal or release learns of its loss.
-- KEYS[1] -> fifo:{NAME}:lock         (string) the record
-- KEYS[2] -> fifo:{NAME}:queue        (zset)   ticket -> position
-- KEYS[3] -> fifo:{NAME}:lost         (zset)   fences whose lease was taken away
-- ARGV[1] -> fence
-- ARGV[2] -> claim window, microseconds
-- ARGV[3] -> how long an idle lock is remembered, milliseconds
-- Returns {1}   evicted
--         {2}   changed
if not read() or holder == '-' or fence ~= tonumber(ARGV[1]) then return {2} end
look_displaced()
local doomed = look('')
displace(ARGV[3])
drop(doomed)
-- The operator is no client: every grant is rung.
local empty = advance(nil, '', tonumber(ARGV[2]))
keep(ARGV[3], empty)
return {1}
