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

local function bad_writes(first, stop)
  local at, log, kinds, stop = first, {}, {}, stop or #ARGV
  while at <= stop do
    local command, key, size = ARGV[at], KEYS[tonumber(ARGV[at + 1]) or 0], tonumber(ARGV[at + 2])
    local kind = KIND[command]
    if not kind then return 'BADWRITE no such command: ' .. command end
    if not key then return 'BADWRITE no such key index: ' .. tostring(ARGV[at + 1]) end
    if not size or size < 0 or size > 7000 or at + 2 + size > stop then return 'BADWRITE argument count for ' .. key end
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

local function write(first, stop)
  local at, stop = first, stop or #ARGV
  while at <= stop do
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

-- Results for messages of one stream. KEYS: in, meta, open, counts, ...   ARGV: group, consumer, then for each message: id,
-- phase, incarnation, gid, number of words, words. `bad` looks at all of them before the first write; then `apply` answers for
-- one after the other. Both get the place of the message in ARGV, and that of its last word.
local function each(bad, apply)
  local places, at = {}, 3
  while at <= #ARGV do
    local last = at + 4 + (tonumber(ARGV[at + 4]) or -9)
    if last < at + 4 or last > #ARGV then return redis.error_reply('BADWRITE number of words for ' .. ARGV[at]) end
    local found = bad(at, last)
    if found then return redis.error_reply(found) end
    places[#places + 1] = {at, last}
    at = last + 1
  end
  local answers = {}
  for i, place in ipairs(places) do answers[i] = apply(place[1], place[2]) end
  return answers
end

-- Takes the message at this place for its owner. Nil, or why its result does not count: then it is taken, counted and dropped,
-- unless it is not the caller's. `further` may find another reason.
local function accept(at, further)
  local id, gid = ARGV[at], ARGV[at + 3]
  if not pending(KEYS[1], ARGV[1], id, ARGV[2]) then return 'LOST' end
  local why = refusal(KEYS[2], KEYS[3], ARGV[at + 1], ARGV[at + 2], gid) or (further and further())
  if not take(KEYS[1], ARGV[1], id) then return 'GONE' end
  if why then call('HINCRBY', KEYS[4], why, 1) end
  return why
end
