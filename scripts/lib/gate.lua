-- The gate in front of a target: the newest fence that wrote. Joined in front of the scripts of the gate.
--
-- Fences are compared as decimal text, so they are exact up to 9223372036854775807; Lua's numbers are not.
-- KEYS[1] -> the gate; KEYS[2] -> the record of the lock that the gate is bound to, if ARGV[1] is '1'.
local GATE, RECORD = KEYS[1], ARGV[1] == '1' and KEYS[2]

local function older(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end

-- A string of ours, or false. A key that holds anything else is named.
local function read(key, pattern)
  local kind = redis.call('TYPE', key).ok
  if kind == 'none' then return false end
  local found = kind == 'string' and string.match(redis.call('GET', key), pattern)
  if not found or #found > 19 then error('FOREIGN ' .. key, 0) end
  return found
end

-- The newest fence that the gate and the lock's record know; '0' for none.
local function newest()
  local known = read(GATE, '^[1-9]%d*$') or '0'
  local granted = RECORD and read(RECORD, '^%S+ (%d+) %d+ %S+ %d+ %d+ %S+ %d+$')
  if granted and older(known, granted) then return granted end
  return known
end
