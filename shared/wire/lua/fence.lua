-- KEYS: assignment, meta   ARGV: the assignment as this worker read it, token   Makes `token` the job's newest trainer.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'LOST' end
redis.call('HSET', KEYS[2], 'fence', ARGV[2])
return 'OK'
