-- KEYS: lease, state, inbox, ...   ARGV: token, expected revision, new revision, snapshot, group, n, id * n, writes
-- Lease, revision and all inputs, or nothing. Revisions are opaque and never used twice, so that a retry after a lost reply is
-- recognised, and one that comes back after a rollback cannot be mistaken for another history's. Inputs must be pending,
-- whoever read them: the lease is the fence.
if ARGV[3] == '' or ARGV[3] == ARGV[2] then return redis.error_reply('BADREVISION ' .. ARGV[3] .. ' is not new') end
local revision = redis.call('HGET', KEYS[2], 'revision') or ''
if revision == ARGV[3] then return {'OK'} end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'FENCED'} end
if revision ~= ARGV[2] then return {'STALE'} end
local last = 6 + tonumber(ARGV[6])
local bad = bad_writes(last + 1)
if bad then return redis.error_reply(bad) end
local gone, seen = {'GONE'}, {}
for i = 7, last do
  if seen[ARGV[i]] or not pending(KEYS[3], ARGV[5], ARGV[i]) then gone[#gone + 1] = ARGV[i] end
  seen[ARGV[i]] = true
end
if #gone > 1 then return gone end
for i = 7, last do take(KEYS[3], ARGV[5], ARGV[i]) end
redis.call('HSET', KEYS[2], 'revision', ARGV[3], 'snapshot', ARGV[4])
write(last + 1)
return {'OK'}
