-- KEYS: in, meta, open, counts, grp, inbox, ...   ARGV: group, consumer, id, phase, incarnation, gid, slot, head, writes
-- Fan-in: fills a slot of the group; the commit that fills the last of the group's `need` slots also sends the whole group to
-- the inbox. Twins and results of closed groups are taken, counted and dropped. The writes go out when the slot was filled.
local bad = bad_writes(9)
if bad then return redis.error_reply(bad) end
local kind, inbox = call('TYPE', KEYS[5]).ok, call('TYPE', KEYS[6]).ok
if kind ~= 'hash' and kind ~= 'none' then return redis.error_reply('BADKEY ' .. KEYS[5] .. ' is a ' .. kind) end
if inbox ~= 'stream' and inbox ~= 'none' then return redis.error_reply('BADKEY ' .. KEYS[6] .. ' is a ' .. inbox) end
if not pending(KEYS[1], ARGV[1], ARGV[3], ARGV[2]) then return 'LOST' end
local why = refusal(KEYS[2], KEYS[3], ARGV[4], ARGV[5], ARGV[6])
local need = tonumber(call('HGET', KEYS[5], 'need') or '')
if not why and not need then why = 'late' end
if not why and call('HEXISTS', KEYS[5], ARGV[7]) == 1 then why = 'twin' end
if not take(KEYS[1], ARGV[1], ARGV[3]) then return 'GONE' end
if why then
  call('HINCRBY', KEYS[4], why, 1)
  return why
end
call('HSET', KEYS[5], ARGV[7], ARGV[8])
write(9)
if call('HINCRBY', KEYS[5], 'have', 1) ~= need then return 'WAIT' end
local out, all = {'g', ARGV[6]}, call('HGETALL', KEYS[5])
for i = 1, #all, 2 do
  local mark = string.sub(all[i], 1, 2)
  if mark == 's:' or mark == 'h:' then
    out[#out + 1] = all[i]
    out[#out + 1] = all[i + 1]
  end
end
call('XADD', KEYS[6], '*', unpack(out))
return 'READY'
