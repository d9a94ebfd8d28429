-- Prepended to every script. A script does not roll back when a call fails half-way, so each makes all of its checks before
-- its first write. XACK comes first among the writes: it is never refused under maxmemory, and after one write Redis
-- refuses nothing else in the script.

-- Writes travel flat at the end of ARGV: command, index into KEYS, number of arguments, arguments. SEND is an XADD that also
-- notes the new entry's place in a group's hash, so that dropping the group can find it: SEND, stream, n, group's key index,
-- field of the note, XADD's fields and values.
local call = redis.call
local KIND = {
  XADD = 'stream', SEND = 'stream', XTRIM = 'stream', XDEL = 'stream', TAKE = 'stream', HSET = 'hash', HDEL = 'hash', HINCRBY = 'hash',
  ZADD = 'zset', ZREM = 'zset', SET = 'string', UNLINK = 'any',
}

local function newest(key)
  if call('EXISTS', key) == 0 then return nil end
  local info = call('XINFO', 'STREAM', key)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
end

local function bad_writes(first)
  local at, log, kinds = first, {}, {}
  while at <= #ARGV do
    local command, key, size = ARGV[at], KEYS[tonumber(ARGV[at + 1]) or 0], tonumber(ARGV[at + 2])
    local kind = KIND[command]
    if not kind then return 'BADWRITE no such command: ' .. command end
    if not key then return 'BADWRITE no such key index: ' .. tostring(ARGV[at + 1]) end
    if not size or size < 0 or size > 7000 or at + 2 + size > #ARGV then return 'BADWRITE argument count for ' .. key end
    local is = kinds[key] or call('TYPE', key).ok
    kinds[key] = is
    if kind ~= 'any' and is ~= kind and is ~= 'none' then return 'BADKEY ' .. key .. ' is a ' .. is .. ', not a ' .. kind end
    if command == 'SEND' and not KEYS[tonumber(ARGV[at + 3]) or 0] then return 'BADWRITE no group key for ' .. key end
    if command == 'XADD' and ARGV[at + 3] ~= '*' then
      local last = log[key] or newest(key) or '0-0'
      local had, want = tonumber(string.match(last, '^(%d+)-')), tonumber(string.match(ARGV[at + 3], '^(%d+)-0$'))
      if not want or want <= had then return 'BADID ' .. ARGV[at + 3] .. ' of ' .. key .. ' does not follow ' .. last end
      log[key] = ARGV[at + 3]
    end
    at = at + 3 + size
  end
end

-- The exactly-once gate. XDEL is right only while a stream has a single group.
local function take(stream, group, id)
  if call('XACK', stream, group, id) == 0 then return false end
  call('XDEL', stream, id)
  return true
end

local function write(first)
  local at = first
  while at <= #ARGV do
    local command, key, size = ARGV[at], KEYS[tonumber(ARGV[at + 1])], tonumber(ARGV[at + 2])
    if command == 'SEND' then
      local id = call('XADD', key, '*', unpack(ARGV, at + 5, at + 2 + size))
      call('HSET', KEYS[tonumber(ARGV[at + 3])], ARGV[at + 4], id)
    elseif command == 'TAKE' then
      call('XACK', key, ARGV[at + 3], ARGV[at + 4])
      call('XDEL', key, ARGV[at + 4])
    elseif size == 0 then
      call(command, key)
    else
      call(command, key, unpack(ARGV, at + 3, at + 2 + size))
    end
    at = at + 3 + size
  end
end

-- {id, consumer, idle, deliveries} of a pending entry, or nil. Without a consumer: whoever owns it.
local function pending(stream, group, id, consumer)
  if consumer then return call('XPENDING', stream, group, id, id, 1, consumer)[1] end
  return call('XPENDING', stream, group, id, id, 1)[1]
end

-- Whether a result may still count: nil, or why not. `phase` is a field of meta, whose value is the incarnation.
local function refusal(meta, open, phase, incarnation, gid)
  local known = call('HGET', meta, phase)
  if not known then return 'wrong_phase' end
  if known ~= incarnation then return 'refused' end
  if not call('ZSCORE', open, gid) then return 'late' end
end
