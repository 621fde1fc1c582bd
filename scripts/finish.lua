-- Ends an attempt at a job, with its memo.
-- Guarantee: only who holds the lock, and has the job pending by his fence, ends it; repeated, it answers the same. Works
-- while the server is out of memory.
-- KEYS[1] -> fifo:{NAME}:lock       (string) the record of the lock
-- KEYS[2] -> fifo:{NAME}:queue      (zset)   not used
-- KEYS[3] -> fifo:{NAME}:lost       (zset)   not used
-- KEYS[4] -> fifo:{NAME}:job:KEY    (hash)   the record of the job; fifo:{job:KEY}:job if the lock is its own
-- ARGV[1] -> ticket
-- ARGV[2] -> fence
-- ARGV[3] -> attempt
-- ARGV[4] -> fingerprint of the payload, or ''
-- ARGV[5] -> 'done', 'failed' or 'retry'
-- ARGV[6] -> how long the record is kept, milliseconds
-- ARGV[7] -> memo, if there is one
-- Returns {1}   recorded
--         {6}   lost
local stage, memo = ARGV[5], ARGV[7]
local job = read_job()
local mine = job and job.fence == tonumber(ARGV[2]) and job.attempt == tonumber(ARGV[3])
if mine and job.stage == stage then return {1} end
if not holds(ARGV[1], ARGV[2]) then return {6} end
-- A record that is gone was evicted or lost: nobody but the holder could have ended the job since.
if job and not (mine and job.stage == 'pending') then return {6} end
redis.call('HDEL', JOB, 'memo')
if job then
  redis.call('HSET', JOB, 'stage', stage)
else
  redis.call('HSET', JOB, 'stage', stage, 'attempt', ARGV[3], 'fence', ARGV[2], 'owner', (parts(ARGV[1])), 'begun',
    string.format('%.0f', clock()), 'print', ARGV[4], 'reclaimed', '0')
end
if memo then redis.call('HSET', JOB, 'memo', memo) end
redis.call('PEXPIRE', JOB, ARGV[6])
return {1}
