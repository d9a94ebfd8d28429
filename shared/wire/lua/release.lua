-- KEYS: key   ARGV: value   Deletes the key if it still holds the value (a lease given back, a worker that leaves).
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
