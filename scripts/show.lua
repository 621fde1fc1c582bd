-- Shows the record of a job.
-- Guarantee: writes nothing.
-- KEYS[1] -> fifo:{NAME}:lock       (string) the record of the lock
-- KEYS[2] -> fifo:{NAME}:queue      (zset)   not used
-- KEYS[3] -> fifo:{NAME}:lost       (zset)   not used
-- KEYS[4] -> fifo:{NAME}:job:KEY    (hash)   the record of the job; fifo:{job:KEY}:job if the lock is its own
-- Returns {stage, live, holder, attempt, fence, owner, age_ms, print, reclaimed, memo}
--         (stage: 1 pending, 2 to be tried again, 3 done, 4 failed; without memo the last is missing)
--         {0, 0, holder}   no record
local now = clock()
local held_by = live_holder(now)
local job = read_job()
if not job then return {0, 0, held_by} end
local reply = {STAGES[job.stage], is_live(job, held_by) and 1 or 0, held_by, job.attempt, job.fence, job.owner,
  math.max(0, math.floor((now - job.begun) / 1000)), job.print, tonumber(job.reclaimed)}
if job.memo then reply[10] = job.memo end
return reply
