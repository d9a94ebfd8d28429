-- KEYS: present, seats, stream of training   ARGV: name, time to live in ms, share
-- One of the seats for evaluations: as many as this share of the workers that are present, at least one; one for everybody while
-- there is nothing to roll out for training. A seat is kept by asking again in time. Answers 1 with a seat, 0 without.
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local gone = now + tonumber(ARGV[2])
redis.call('ZADD', KEYS[1], gone, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local workers = redis.call('ZCARD', KEYS[1])
local most = math.max(1, math.floor(tonumber(ARGV[3]) * workers + 1e-9))
if redis.call('XLEN', KEYS[3]) == 0 then most = workers end
local taken = redis.call('ZCARD', KEYS[2])
if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then taken = taken + 1 end
if taken > most then
  redis.call('ZREM', KEYS[2], ARGV[1])
  return 0
end
redis.call('ZADD', KEYS[2], gone, ARGV[1])
return 1
