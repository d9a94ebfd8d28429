-- KEYS: meta, inbox   ARGV: fencing token, event...
-- The trainer's words to the controller, only while its token is the job's newest.
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1] then return 'FENCED' end
local kind = redis.call('TYPE', KEYS[2]).ok
if kind ~= 'stream' and kind ~= 'none' then return redis.error_reply('BADKEY ' .. KEYS[2] .. ' is a ' .. kind) end
for i = 2, #ARGV do redis.call('XADD', KEYS[2], '*', 'e', ARGV[i]) end
return 'OK'
