-- Granting: who comes next. Joined behind record.lua where a call can free the lock.

-- Looks at everything that granting the next ticket will touch, before anything is written. Gives the tickets of
-- suspects that stand at the head of the queue, at most 1000 of them. Only needed when granting is not the first
-- write of the call, or when there are suspects.
local function look(me)
  local doomed = {}
  local heads = ask('ZRANGE', QUEUE, 0, suspects == '-' and 0 or 1000)
  for i = 1, #heads do
    local client = parts(heads[i])
    if not client then error('FOREIGN ' .. QUEUE, 0) end
    if #doomed == 1000 or not suspected(client) then
      if client ~= me then ask('LLEN', bell_of(client)) end
      break
    end
    doomed[#doomed + 1] = heads[i]
  end
  return doomed
end

-- Drops the tickets that `look` gave. A client that lives comes back at its old position.
local function drop(doomed)
  if doomed[1] then redis.call('ZREM', QUEUE, unpack(doomed)) end
end

-- Gives the lock to a ticket. A grant to the caller's client is told by the reply, any other by a ring.
local function grant(now, ticket, position, me, claim_us)
  local client, lease_ms = parts(ticket)
  local minted = math.max(fence + 1, now)
  if not client then
    redis.call('ZADD', QUEUE, string.format('%.0f', position), ticket)
    error('FOREIGN ' .. QUEUE, 0)
  end
  claim = false
  if client ~= me then
    claim = now + math.min(lease_ms * 1000, claim_us)
    local bell = bell_of(client)
    local rung = redis.pcall('LPUSH', bell, ticket .. ' ' .. string.format('%.0f', minted))
    if type(rung) == 'table' then
      -- Only popping the head came before, so putting it back undoes the whole call.
      redis.call('ZADD', QUEUE, string.format('%.0f', position), ticket)
      error((string.find(rung.err, 'WRONGTYPE', 1, true) and 'FOREIGN ' .. bell) or rung.err, 0)
    end
    redis.call('PEXPIRE', bell, lease_ms)
  end
  holder, fence, until_at, place = ticket, minted, now + lease_ms * 1000, position
  pos = math.max(pos, position)
end

-- Frees the lock and grants the head of the queue. Says whether the queue was empty.
local function advance(now, me, claim_us)
  holder, until_at, claim, place = '-', 0, false, 0
  local head = ask('ZPOPMIN', QUEUE)
  if not head[1] then return true end
  grant(now or clock(), head[1], tonumber(head[2]), me, claim_us)
  return false
end
