-- Shows the state of a lock.
-- Guarantee: writes nothing.
-- KEYS[1] -> fifo:{NAME}:lock   (string) the record
-- KEYS[2] -> fifo:{NAME}:queue  (zset)   ticket -> position
-- ARGV[1] -> how many queued tickets to show
-- Returns {now, record or '', waiting, ticket, position, ticket, position, ...}
local text = read() and redis.call('GET', LOCK) or ''
local reply = {clock(), text, ask('ZCARD', QUEUE)}
if tonumber(ARGV[1]) > 0 then
  local queue = redis.call('ZRANGE', QUEUE, 0, ARGV[1] - 1, 'WITHSCORES')
  for i = 1, #queue, 2 do
    reply[#reply + 1] = queue[i]
    reply[#reply + 1] = string.format('%.0f', tonumber(queue[i + 1]))
  end
end
return reply
