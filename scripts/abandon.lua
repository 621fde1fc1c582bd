-- Gives a ticket up, whatever became of it: queued, granted meanwhile, or unknown.
-- Guarantee: afterwards the ticket is neither queued nor holder; works while the server is out of memory.
-- KEYS[1] -> fifo:{NAME}:lock         (string) the record
-- KEYS[2] -> fifo:{NAME}:queue        (zset)   ticket -> position
-- KEYS[3] -> fifo:{NAME}:lost         (zset)   fences whose lease was taken away
-- KEYS[4] -> fifo:{NAME}:bell:CLIENT  (list)   the caller's bell
-- ARGV[1] -> ticket
-- ARGV[2] -> claim window, microseconds
-- ARGV[3] -> how long an idle lock is remembered, milliseconds
-- Returns {1, next, next_fence}   abandoned
local ticket, idle_ms = ARGV[1], ARGV[3]
local me = parts(ticket)
local known = read()
local trusted = known and trust(me)
local granted = known and holder == ticket
local doomed = granted and look(me) or {}
if known then look_named(me) end
ask('ZREM', QUEUE, ticket)
if not known then return {1, '', 0} end
local empty
if granted then
  claimed()
  drop(doomed)
  empty = advance(nil, me, tonumber(ARGV[2]))
end
local next_ticket, next_fence, named = name(me)
-- Without a holder the ticket may have been the last that kept the record from going idle.
if granted or trusted or named or holder == '-' then keep(idle_ms, empty) end
return {1, next_ticket, next_fence}
