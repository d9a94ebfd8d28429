-- KEYS: in, meta, open, counts, ...   ARGV: group, consumer, id, phase, incarnation, gid, writes
-- A middle hop: the owner's first commit takes the input and makes all writes. One for a closed group or a wrong phase is
-- taken, counted and dropped.
local bad = bad_writes(7)
if bad then return redis.error_reply(bad) end
if not pending(KEYS[1], ARGV[1], ARGV[3], ARGV[2]) then return 'LOST' end
local why = refusal(KEYS[2], KEYS[3], ARGV[4], ARGV[5], ARGV[6])
if not take(KEYS[1], ARGV[1], ARGV[3]) then return 'GONE' end
if why then
  call('HINCRBY', KEYS[4], why, 1)
  return why
end
write(7)
return 'OK'
