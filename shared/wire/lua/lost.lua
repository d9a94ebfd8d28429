-- KEYS: in, grp   ARGV: group, consumer, id, stage:slice, previous owner   Returns {lost leases, distinct owners} or {}.
-- Counted only for a group that is still open (its hash exists): the hash must not come back from the dead.
if not pending(KEYS[1], ARGV[1], ARGV[3], ARGV[2]) then return {} end
if redis.call('EXISTS', KEYS[2]) == 0 then return {0, 0} end
local owners, count = redis.call('HGET', KEYS[2], 'by:' .. ARGV[4]) or '', 0
if not string.find(owners, '|' .. ARGV[5] .. '|', 1, true) then
  owners = owners .. '|' .. ARGV[5] .. '|'
  redis.call('HSET', KEYS[2], 'by:' .. ARGV[4], owners)
end
for _ in string.gmatch(owners, '|[^|]+|') do count = count + 1 end
return {redis.call('HINCRBY', KEYS[2], 'lost:' .. ARGV[4], 1), count}
