-- The record of the lock, and the keys it stands on. Joined in front of every script.
--
-- Rules that all scripts keep:
--   * every check, of types too, comes before the first write, so a call does all of its writes or none;
--   * `now` is the server's TIME, read once; numbers are whole, below 2^53, and written with %.0f only;
--   * under memory pressure only a call's first write can be refused, so it is one that frees.
local LOCK, QUEUE, LOST = KEYS[1], KEYS[2], KEYS[3]

local holder, fence, until_at, claim, pos, born, suspects, place

-- Runs a command whose only possible surprise is a key of another type; that one is named.
local function ask(command, key, ...)
  local reply = redis.pcall(command, key, ...)
  if type(reply) == 'table' and reply.err then
    if string.find(reply.err, 'WRONGTYPE', 1, true) then error('FOREIGN ' .. key, 0) end
    return redis.call(command, key, ...)
  end
  return reply
end

-- The server's time in microseconds.
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function bell_of(client)
  return string.sub(LOCK, 1, -5) .. 'bell:' .. client
end

-- The client and the lease in milliseconds that a ticket names, or nil.
local function parts(ticket)
  return string.match(ticket, '^([%w_%-]+)%.%d+%.(%d+)$')
end

-- Reads the record into the locals above; false if there is none.
local function read()
  local text = ask('GET', LOCK)
  if not text then return false end
  local h, f, u, c, p, b, s, l =
    string.match(text, '^(%S+) (%d+) (%d+) (%S+) (%d+) (%d+) (%S+) (%d+)$')
  holder, claim, suspects = h, false, s
  fence, until_at, pos, born, place = tonumber(f), tonumber(u), tonumber(p), tonumber(b), tonumber(l)
  if c and c ~= '-' then claim = string.find(c, '^%d+$') and tonumber(c) end
  if not h or claim == nil or math.max(fence, until_at, claim or 0, pos, born, place) >= 9007199254740992
    or (h ~= '-' and not parts(h)) then
    error('FOREIGN ' .. LOCK, 0)
  end
  return true
end

-- Stores the record: without expiry while somebody holds the lock or waits, so that no eviction policy for keys
-- that expire can take it. `empty` says whether the queue is, if the caller knows.
local function keep(idle_ms, empty)
  local idle = holder == '-' and (empty or (empty == nil and ask('ZCARD', QUEUE) == 0))
  if idle then suspects = '-' end
  local text = string.format('%s %.0f %.0f %s %.0f %.0f %s %.0f', holder, fence, until_at,
    claim and string.format('%.0f', claim) or '-', pos, born, suspects, place)
  if idle then
    redis.call('SET', LOCK, text, 'PX', idle_ms)
  else
    redis.call('SET', LOCK, text)
  end
end

-- The same for a call that has not written yet and must work while memory is short: PERSIST can only free.
local function keep_first(idle_ms)
  local empty = holder == '-' and ask('ZCARD', QUEUE) == 0
  redis.call('PERSIST', LOCK)
  keep(idle_ms, empty)
end

local function suspected(client)
  return suspects ~= '-' and string.find(',' .. suspects .. ',', ',' .. client .. ',', 1, true) ~= nil
end

-- Forgets a suspicion: the client has just been heard of. Says whether there was one.
local function trust(client)
  if not suspected(client) then return false end
  local kept = {}
  for suspect in string.gmatch(suspects, '[^,]+') do
    if suspect ~= client then kept[#kept + 1] = suspect end
  end
  suspects = kept[1] and table.concat(kept, ',') or '-'
  return true
end

-- Takes a lease back into the present if the server's clock went back under it: else nobody could be granted
-- until the clock has caught up. Says whether it did.
local function correct_clock(now, regroup_us)
  local longest = regroup_us
  if holder ~= '-' then
    local _, lease_ms = parts(holder)
    longest = lease_ms * 1000
  end
  local ahead = until_at - now - longest
  if ahead <= 0 then return false end
  until_at = until_at - ahead
  if claim then claim = math.max(claim - ahead, 0) end
  return true
end

-- Takes the grant for known by its holder, so that nobody passes it over. LTRIM to nothing is a DEL that refuses a
-- key of another type.
local function claimed()
  if claim then
    claim = false
    ask('LTRIM', bell_of(parts(holder)), 1, 0)
  end
end

-- Looks at what `name` will touch, for a call that writes something else before.
local function look_named(me)
  if claim and parts(holder) == me then ask('LLEN', bell_of(me)) end
end

-- Names the current grant if it is the caller's: its ticket and fence for the reply, and whether the record changed.
-- Naming is claiming: from here on the caller may believe it, so the server must not take it for unclaimed.
local function name(me)
  if holder == '-' or parts(holder) ~= me then return '', 0, false end
  local unclaimed = claim ~= false
  claimed()
  return holder, fence, unclaimed
end
