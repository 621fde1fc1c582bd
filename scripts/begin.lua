-- Begins a job as the holder of the lock.
-- Guarantee: only the holder begins a job, and it is pending by his fence from then on; a job that is pending by another
-- fence was left by somebody who is not the holder any more. The same call again is answered in the same way.
-- KEYS[1] -> fifo:{NAME}:lock       (string) the record of the lock
-- KEYS[2] -> fifo:{NAME}:queue      (zset)   not used
-- KEYS[3] -> fifo:{NAME}:lost       (zset)   not used
-- KEYS[4] -> fifo:{NAME}:job:KEY    (hash)   the record of the job; fifo:{job:KEY}:job if the lock is its own
-- ARGV[1] -> ticket
-- ARGV[2] -> fence
-- ARGV[3] -> fingerprint of the payload, or ''
-- ARGV[4] -> how often the job may be begun, '' for any number
-- ARGV[5] -> how long the record is kept, milliseconds
-- Returns {1, attempt, reclaimed}   begun
--         {2, memo}                 done; without memo {2}
--         {3, memo}                 failed for good; without memo {3}
--         {4, attempts}             begun as often as it may be
--         {5}                       the key was used for another payload
--         {6}                       lost
local print, most = ARGV[3], tonumber(ARGV[4])
if not holds(ARGV[1], ARGV[2]) then return {6} end
local job = read_job()
local attempt, reclaimed = 0, '0'
if job then
  if print ~= '' and job.print ~= '' and print ~= job.print then return {5} end
  if job.stage == 'done' then return job.memo and {2, job.memo} or {2} end
  if job.stage == 'failed' then return job.memo and {3, job.memo} or {3} end
  if job.stage == 'pending' then
    if job.fence == fence then return {1, job.attempt, tonumber(job.reclaimed)} end
    reclaimed = '1'
  end
  attempt = job.attempt
  if print == '' then print = job.print end
end
if most and attempt >= most then return {4, attempt} end
redis.call('HSET', JOB, 'stage', 'pending', 'attempt', attempt + 1, 'fence', ARGV[2], 'owner', (parts(ARGV[1])),
  'begun', string.format('%.0f', clock()), 'print', print, 'reclaimed', reclaimed)
redis.call('HDEL', JOB, 'memo')
redis.call('PEXPIRE', JOB, ARGV[5])
return {1, attempt + 1, tonumber(reclaimed)}
