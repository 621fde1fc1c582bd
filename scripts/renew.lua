-- Starts a lease again from now.
-- Guarantee: never takes the lock back once anybody else was granted; works while the server is out of memory.
-- KEYS[1] -> fifo:{NAME}:lock         (string) the record
-- KEYS[2] -> fifo:{NAME}:queue        (zset)   ticket -> position
-- KEYS[3] -> fifo:{NAME}:lost         (zset)   fences whose lease was taken away
-- KEYS[4] -> fifo:{NAME}:bell:CLIENT  (list)   the caller's bell
-- ARGV[1] -> ticket
-- ARGV[2] -> fence
-- ARGV[3] -> how long an idle lock is remembered, milliseconds
-- ARGV[4] -> how long nobody is granted after data was lost, microseconds
-- Returns {1, waiters}            renewed
--         {2, next, next_fence}   lost
local ticket = ARGV[1]
local me, lease_ms = parts(ticket)
if not read() then return {2, '', 0} end
local now = clock()
local changed = correct_clock(now, tonumber(ARGV[4]))
changed = trust(me) or changed
if holder == ticket and fence == tonumber(ARGV[2]) then
  -- A lapsed lease that nobody was granted since is still whole, so it may go on.
  local waiters = ask('ZCARD', QUEUE)
  if claim then claimed() else redis.call('PERSIST', LOCK) end
  until_at = now + lease_ms * 1000
  keep(ARGV[3])
  return {1, waiters}
end
local next_ticket, next_fence, named = name(me)
if changed or named then keep_first(ARGV[3]) end
return {2, next_ticket, next_fence}
