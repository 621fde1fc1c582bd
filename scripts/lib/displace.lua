-- Taking the lock from its holder. Joined behind record.lua where a call can do that.

-- Remembers the lost fence, silences the holder's bell and suspects a client that never picked its grant up.
-- `look_displaced` comes before the first write of the call, `displace` is the first write: it frees.
local function look_displaced()
  ask('ZCARD', LOST)
  ask('LLEN', bell_of(parts(holder)))
  local client = parts(holder)
  if claim and not suspected(client) then
    local kept = {}
    for suspect in string.gmatch(suspects .. ',' .. client, '[^,]+') do
      if suspect ~= '-' then kept[#kept + 1] = suspect end
    end
    -- 16 are remembered; see SUSPECTS in the machine.
    if #kept > 16 then table.remove(kept, 1) end
    suspects = table.concat(kept, ',')
  end
end

local function displace(idle_ms)
  redis.call('LTRIM', bell_of(parts(holder)), 1, 0)
  redis.call('ZADD', LOST, string.format('%.0f', fence), string.format('%.0f', fence))
  -- 128 are remembered; a fence below `born` counts as lost.
  local forgotten = redis.call('ZCARD', LOST) - 128
  if forgotten > 0 then
    local cut = redis.call('ZPOPMIN', LOST, forgotten)
    born = math.max(born, tonumber(cut[#cut]) + 1)
  end
  redis.call('PEXPIRE', LOST, idle_ms)
  holder, until_at, claim, place = '-', 0, false, 0
end
