-- Takes the lock for a ticket, or a place in its queue.
-- Guarantee: nobody is granted before a queued ticket with a smaller position; the same ticket again is the same
-- attempt, so a call whose reply was lost may be repeated.
-- KEYS[1] -> fifo:{NAME}:lock         (string) the record
-- KEYS[2] -> fifo:{NAME}:queue        (zset)   ticket -> position
-- KEYS[3] -> fifo:{NAME}:lost         (zset)   fences whose lease was taken away
-- KEYS[4] -> fifo:{NAME}:bell:CLIENT  (list)   the caller's bell
-- ARGV[1] -> ticket
-- ARGV[2] -> its position, microseconds, or '' if it has none yet
-- ARGV[3] -> claim window, microseconds
-- ARGV[4] -> how long an idle lock is remembered, milliseconds
-- ARGV[5] -> how long nobody is granted after data was lost, microseconds
-- ARGV[6] -> '1' to wait, '0' to try
-- ARGV[7] -> how many may be queued, '' for any number
-- Returns {1, fence, position}                                                    granted
--         {2, position, ahead, holder_ms, newest, reentered, next, next_fence}    waiting
--         {3, next, next_fence}                                                   busy
--         {4, next, next_fence}                                                   full
local ticket, position, wait = ARGV[1], tonumber(ARGV[2]), ARGV[6] == '1'
local claim_us, idle_ms, regroup_us = tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local max_queue = tonumber(ARGV[7])
local me, lease_ms = parts(ticket)
local now = clock()
local known = read()
local waiting = ask('ZCARD', QUEUE)
local changed = false
if not known then
  holder, fence, until_at, claim, pos, born, suspects, place = '-', 0, 0, false, 0, now, '-', 0
  if position or waiting > 0 then
    -- Data was lost: somebody remembers a place that the record does not. Others will come back too, so nobody is
    -- granted until they had the time; else the fastest would win over the first.
    until_at, changed = now + regroup_us, true
  end
  -- The newest position is in the queue, if that is still there; else a newcomer could get before it.
  if waiting > 0 then pos = tonumber(redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]) end
end
changed = correct_clock(now, regroup_us) or changed
changed = trust(me) or changed

if holder == ticket then
  -- The reply of an earlier call was lost, or a ring is on its way: this reply proves the grant anew.
  if claim then claimed() else redis.call('PERSIST', LOCK) end
  until_at = now + lease_ms * 1000
  keep(idle_ms)
  return {1, fence, place}
end

local queued = waiting > 0 and ask('ZSCORE', QUEUE, ticket)
local reentered = not queued and position ~= nil and wait

local function enqueue(at)
  at = at or math.max(pos + 1, now)
  pos = math.max(pos, at)
  redis.call('ZADD', QUEUE, string.format('%.0f', at), ticket)
  waiting = waiting + 1
  changed = true
  return at
end

local function refuse(code)
  local next_ticket, next_fence, named = name(me)
  if changed or named then keep(idle_ms) end
  return {code, next_ticket, next_fence}
end

local function answer_waiting(at)
  local ahead = redis.call('ZRANK', QUEUE, ticket)
  local next_ticket, next_fence, named = name(me)
  local free_at = (claim and claim > now) and claim or until_at
  if changed or named then keep(idle_ms, false) end
  return {2, at, ahead, math.max(0, math.ceil((free_at - now) / 1000)), fence, reentered and 1 or 0, next_ticket,
    next_fence}
end

-- Free: nobody holds the lock, the lease lapsed, or the grant was not picked up. Popping the bell is atomic, and so
-- is this look at it followed by its deletion: exactly one of the two happens, so a grant that somebody believes is
-- never taken for unclaimed. A grant of the caller's own is named in the reply instead of being passed over.
local free = until_at <= now
if not free and claim and claim <= now then
  local client = parts(holder)
  free = client ~= me and ask('LINDEX', bell_of(client), 0) == holder .. ' ' .. string.format('%.0f', fence)
end

if not free then
  if queued then
    if changed then redis.call('PERSIST', LOCK) end
    return answer_waiting(tonumber(queued))
  end
  if not reentered then
    if not wait then return refuse(3) end
    if max_queue and waiting >= max_queue then return refuse(4) end
  end
  look_named(me)
  -- A place that was promised is given back even when memory is short: PERSIST is the write that may be refused.
  if reentered then redis.call('PERSIST', LOCK) end
  return answer_waiting(enqueue(position))
end

local displaced = holder ~= '-'
if displaced then
  look_displaced()
  trust(me)
end
if displaced or suspects ~= '-' or reentered then
  local doomed = look(me)
  if displaced then displace(idle_ms) else redis.call('PERSIST', LOCK) end
  drop(doomed)
  waiting = waiting - #doomed
end
if reentered then enqueue(position) end
if waiting == 0 then
  grant(now, ticket, math.max(pos + 1, now), me, claim_us)
else
  advance(now, me, claim_us)
  waiting = waiting - 1
end
changed = true
if holder == ticket then
  keep(idle_ms)
  return {1, fence, place}
end
local at = queued and tonumber(queued) or position
if not queued and not reentered then
  if not wait then return refuse(3) end
  if max_queue and waiting >= max_queue then return refuse(4) end
  at = enqueue()
end
return answer_waiting(at)
