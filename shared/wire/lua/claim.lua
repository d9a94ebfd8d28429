-- KEYS: in   ARGV: group, consumer, min idle ms, count, start   Returns {next start, {id, previous owner, idle, fields}...}
-- Entries whose lease is over. Those deleted while pending are dropped: 6.2 would hand them out as nil and keep them for ever.
-- An entry that was handed back by NACK has an idle time of a day; that is no lost lease.
local page = redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], ARGV[5], '+', ARGV[4])
local out = {#page == tonumber(ARGV[4]) and '(' .. page[#page][1] or ''}
for _, row in ipairs(page) do
  local entry = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, row[1])[1]
  if entry then
    out[#out + 1] = {row[1], row[2], row[3], entry[2]}
  else
    redis.call('XACK', KEYS[1], ARGV[1], row[1])
  end
end
return out
