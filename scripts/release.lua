-- Ends a lease and grants the next ticket.
-- Guarantee: only exactly this lease is ended; repeated, it answers `already`; a lease that was taken away is never
-- called released; works while the server is out of memory.
-- KEYS[1] -> fifo:{NAME}:lock         (string) the record
-- KEYS[2] -> fifo:{NAME}:queue        (zset)   ticket -> position
-- KEYS[3] -> fifo:{NAME}:lost         (zset)   fences whose lease was taken away
-- KEYS[4] -> fifo:{NAME}:bell:CLIENT  (list)   the caller's bell
-- ARGV[1] -> ticket
-- ARGV[2] -> fence
-- ARGV[3] -> claim window, microseconds
-- ARGV[4] -> how long an idle lock is remembered, milliseconds
-- Returns {1, next, next_fence}   released
--         {2, next, next_fence}   already
--         {3, next, next_fence}   lost
local ticket, mine = ARGV[1], tonumber(ARGV[2])
local idle_ms = ARGV[4]
local me = parts(ticket)
if not read() then return {3, '', 0} end
local trusted = trust(me)
if holder == ticket and fence == mine then
  if suspects ~= '-' then drop(look(me)) end
  local empty = advance(nil, me, tonumber(ARGV[3]))
  local next_ticket, next_fence = name(me)
  keep(idle_ms, empty)
  return {1, next_ticket, next_fence}
end
local lost = ask('ZSCORE', LOST, ARGV[2]) or mine < born or mine > fence
local next_ticket, next_fence, named = name(me)
if trusted or named then keep_first(idle_ms) end
return {lost and 3 or 2, next_ticket, next_fence}
