-- Makes a list of writes if their fence is not older than the newest.
-- Guarantee: all of the writes or none. Everything that can make a write fail is checked before the first one: the
-- fence, the types (as they will be when its turn comes), the range of what is incremented, and, on servers that can
-- tell (7.0), the user's permissions; the caller has checked the arguments. Memory is refused to a first write only.
-- KEYS[1] -> the gate                      (string) the newest fence that wrote
-- KEYS[2] -> fifo:{NAME}:lock, if bound    (string) the record of the lock
-- KEYS[n] -> the keys that are written
-- ARGV[1] -> '1' if the gate is bound to a lock
-- ARGV[2] -> fence
-- ARGV[3] -> how long the gate is remembered, milliseconds, '' for ever
-- ARGV[n] -> for each write: command, which of KEYS, two words, number of arguments, arguments
--            (the words: for INCRBY and HINCRBY the least and the largest number that can be added to;
--            for SET 'NX', 'XX' or '', and '')
-- Returns {1, answer, ...}    applied; the answer of each write
--         {2, newest}         fenced out
--         {3, n, type}        the n-th write finds another type
--         {4, n}              the n-th write increments what is no number, or too large a one
--         {5, n}              the n-th write is not permitted
local fence, remember_ms = ARGV[2], ARGV[3]

local NEEDS = {
  INCRBY = 'string', HSET = 'hash', HDEL = 'hash', HINCRBY = 'hash', LPUSH = 'list', RPUSH = 'list', LTRIM = 'list',
  SADD = 'set', SREM = 'set', ZADD = 'zset', ZREM = 'zset',
}
local CREATES = {
  SET = 'string', INCRBY = 'string', HSET = 'hash', HINCRBY = 'hash', LPUSH = 'list', RPUSH = 'list', SADD = 'set',
  ZADD = 'zset', DEL = 'none',
}

-- Whether a <= b, both whole numbers as text.
local function at_most(a, b)
  local minus_a, minus_b = string.sub(a, 1, 1) == '-', string.sub(b, 1, 1) == '-'
  if minus_a ~= minus_b then return minus_a end
  if minus_a then return not older(a, b) end
  return not older(b, a)
end

local known = newest()
if older(fence, known) then return {2, known} end

local writes, kinds = {}, {}
local at = 4
while ARGV[at] do
  local name, key, count = ARGV[at], KEYS[tonumber(ARGV[at + 1])], tonumber(ARGV[at + 4])
  local low, high = ARGV[at + 2], ARGV[at + 3]
  local write = {name, key, unpack(ARGV, at + 5, at + 4 + count)}
  at = at + 5 + count
  local n, kind = #writes, kinds[key] or redis.call('TYPE', key).ok
  if NEEDS[name] and kind ~= 'none' and kind ~= NEEDS[name] then return {3, n, kind} end
  if kind ~= 'none' and (name == 'INCRBY' or name == 'HINCRBY') then
    local number
    if name == 'INCRBY' then number = redis.call('GET', key) else number = redis.call('HGET', key, write[3]) end
    if number and not ((number == '0' or string.find(number, '^%-?[1-9]%d*$')) and at_most(low, number)
      and at_most(number, high)) then
      return {4, n}
    end
  end
  local creates = CREATES[name]
  if name == 'SET' then
    if low ~= '' then write[#write + 1] = low end
    if low == 'NX' and kind ~= 'none' then creates = kind end
    if low == 'XX' and kind == 'none' then creates = 'none' end
  end
  kinds[key] = creates or kind
  if redis.acl_check_cmd and not redis.acl_check_cmd(unpack(write)) then return {5, n} end
  writes[n + 1] = write
end

if remember_ms ~= '' then
  redis.call('SET', GATE, fence, 'PX', remember_ms)
else
  redis.call('SET', GATE, fence)
end
local reply = {1}
for i, write in ipairs(writes) do
  local answer = redis.call(unpack(write))
  -- What is larger than 2^53 reaches Lua rounded, so the sum is read as text.
  if write[1] == 'INCRBY' then answer = redis.call('GET', write[2]) end
  if write[1] == 'HINCRBY' then answer = redis.call('HGET', write[2], write[3]) end
  if type(answer) == 'table' then answer = 1 end
  reply[i + 1] = answer or 0
end
return reply
