-- Fan-in, as `each` takes it, with KEYS: in, meta, open, counts, inbox, ...; the words are the index of the group's key, slot,
-- head, writes. Fills a slot of the group; the commit that fills the last of the group's `need` slots also sends the whole group
-- to the inbox. Twins are refused as results of closed groups are. The writes go out when the slot was filled.
local inbox = call('TYPE', KEYS[5]).ok
if inbox ~= 'stream' and inbox ~= 'none' then return redis.error_reply('BADKEY ' .. KEYS[5] .. ' is a ' .. inbox) end

local function bad(at, last)
  local group = KEYS[tonumber(ARGV[at + 5]) or 0]
  if not group or last < at + 7 then return 'BADWRITE no group key or no head for ' .. ARGV[at + 3] end
  local kind = call('TYPE', group).ok
  if kind ~= 'hash' and kind ~= 'none' then return 'BADKEY ' .. group .. ' is a ' .. kind end
  return bad_writes(at + 8, last)
end

return each(bad, function(at, last)
  local group, slot = KEYS[tonumber(ARGV[at + 5])], ARGV[at + 6]
  local need
  local why = accept(at, function()
    need = tonumber(call('HGET', group, 'need') or '')
    return (not need and 'late') or (call('HEXISTS', group, slot) == 1 and 'twin') or nil
  end)
  if why then return why end
  call('HSET', group, slot, ARGV[at + 7])
  write(at + 8, last)
  if call('HINCRBY', group, 'have', 1) ~= need then return 'WAIT' end
  local out, all = {'g', ARGV[at + 3]}, call('HGETALL', group)
  for i = 1, #all, 2 do
    local mark = string.sub(all[i], 1, 2)
    if mark == 's:' or mark == 'h:' then
      out[#out + 1] = all[i]
      out[#out + 1] = all[i + 1]
    end
  end
  call('XADD', KEYS[5], '*', unpack(out))
  return 'READY'
end)
