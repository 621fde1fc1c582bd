-- Deletes the record of a job unless somebody works on it.
-- Guarantee: a job whose owner holds the lock is not touched.
-- KEYS[1] -> fifo:{NAME}:lock       (string) the record of the lock
-- KEYS[2] -> fifo:{NAME}:queue      (zset)   not used
-- KEYS[3] -> fifo:{NAME}:lost       (zset)   not used
-- KEYS[4] -> fifo:{NAME}:job:KEY    (hash)   the record of the job; fifo:{job:KEY}:job if the lock is its own
-- Returns {1}   cleared
--         {0}   there was no record
--         {2}   somebody works on it
local job = read_job()
if not job then return {0} end
if is_live(job, live_holder(clock())) then return {2} end
redis.call('DEL', JOB)
return {1}
