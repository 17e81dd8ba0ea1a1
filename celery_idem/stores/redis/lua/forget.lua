-- decide_forget. ARGV: now, the fence seen, or '' to remove a record that cannot be read.

local r, bad = read(nil, #FIELDS)
local notes = {}
if r and not r.newer then
  for _, name in ipairs(redis.call('HKEYS', KEY)) do
    if string.sub(name, 1, 2) == 'm:' then
      notes[name] = note_of(redis.call('HGET', KEY, name))
      if not notes[name] then bad = name end
    end
  end
end
if ARGV[2] == '' then return bad and redis.call('DEL', KEY) or 0 end
if bad then return {'CORRUPT', bad} end
if not r or r.newer or r.expires <= NOW or r.fence ~= tonumber(ARGV[2]) then return 0 end

redis.call('HDEL', KEY, 'completed', 'kind', 'body', 'type', 'encoding', 'checksum')
redis.call('HSET', KEY, 'state', 'RELEASED', 'token', '', 'answer', 'ACQUIRED', 'fingerprint', '', 'attempts', '0',
  'unknown', '0', 'lease_end', text(NOW))
for name, note in pairs(notes) do
  redis.call('HSET', KEY, name, json_of({over = note.over, successor = note.successor, parked = note.parked, settled = false, at = note.at}))
end
expire(math.max(NOW + DAY, r.expires))
return 1
