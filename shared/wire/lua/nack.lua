-- KEYS: in, grp, dead, inbox, counts, open   ARGV: group, consumer, id, gid, stage:slice, limit, error, event
-- Counts an error. Below `limit` the entry is claimable at once; from it on it goes to the dead letters with its error, and the
-- inbox hears `event`, in one step. The controller closes the group. Limit 0: straight to the dead letters.
local dead, inbox = redis.call('TYPE', KEYS[3]).ok, redis.call('TYPE', KEYS[4]).ok
if dead ~= 'stream' and dead ~= 'none' then return redis.error_reply('BADKEY ' .. KEYS[3] .. ' is a ' .. dead) end
if inbox ~= 'stream' and inbox ~= 'none' then return redis.error_reply('BADKEY ' .. KEYS[4] .. ' is a ' .. inbox) end
if not pending(KEYS[1], ARGV[1], ARGV[3], ARGV[2]) then return 'LOST' end
if not redis.call('ZSCORE', KEYS[6], ARGV[4]) then
  if not take(KEYS[1], ARGV[1], ARGV[3]) then return 'GONE' end
  redis.call('HINCRBY', KEYS[5], 'late', 1)
  return 'late'
end
local errors = redis.call('HINCRBY', KEYS[2], 'err:' .. ARGV[5], 1)
if errors < tonumber(ARGV[6]) then
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'IDLE', 86400000, 'JUSTID')
  return 'AGAIN'
end
local found = redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3])[1]
if not take(KEYS[1], ARGV[1], ARGV[3]) then return 'GONE' end
local letter = {'gid', ARGV[4], 'stage', ARGV[5], 'errors', errors, 'error', ARGV[7]}
for i, value in ipairs(found and found[2] or {}) do
  letter[#letter + 1] = i % 2 == 1 and 'message.' .. value or value
end
redis.call('XADD', KEYS[3], '*', unpack(letter))
redis.call('XADD', KEYS[4], '*', 'e', ARGV[8])
return 'DEAD'
