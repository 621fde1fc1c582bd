-- The record of a job. Joined behind record.lua: a job is pending by the fence of a grant of that lock, and alive as long
-- as that grant is the lock's.
local JOB = KEYS[4]

local STAGES = {pending = 1, retry = 2, done = 3, failed = 4}

-- The record as a table, or false if there is none.
local function read_job()
  local f = ask('HMGET', JOB, 'stage', 'attempt', 'fence', 'owner', 'begun', 'print', 'reclaimed', 'memo')
  if not f[1] and redis.call('EXISTS', JOB) == 0 then return false end
  local job = {stage = f[1], attempt = tonumber(f[2]), fence = tonumber(f[3]), owner = f[4], begun = tonumber(f[5]),
    print = f[6], reclaimed = f[7], memo = f[8]}
  if not (STAGES[job.stage] and job.attempt and job.fence and job.owner and job.begun and job.print and job.reclaimed)
  then
    error('FOREIGN ' .. JOB, 0)
  end
  return job
end

-- Whether exactly this grant is the lock's. One that has lapsed counts until somebody else is granted, as for `renew`.
local function holds(ticket, mine)
  return read() and holder == ticket and fence == tonumber(mine)
end

-- The client that holds the lock, or ''.
local function live_holder(now)
  if not read() or holder == '-' or until_at <= now then return '' end
  return (parts(holder))
end

local function is_live(job, held_by)
  return job and job.stage == 'pending' and held_by ~= '' and fence == job.fence
end
