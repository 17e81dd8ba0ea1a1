-- decide_complete. ARGV: as claim.lua, but 8 is the claim's fence; then answer, attempts, unknown, kind,
-- '1' where a value was kept, body, content type, content encoding, checksum.

local message = ARGV[3]
local r, bad = read(message, HEAD)
if bad then return {'CORRUPT', bad} end

if r and r.newer then return 'LOST' end

local note
if not r or r.expires <= NOW then
  if r then redis.call('DEL', KEY) end
  note = note_of()
  claimed(note, tonumber(ARGV[8]), ARGV[14], tonumber(ARGV[15]), ARGV[16] == '1')
else
  if r.token ~= ARGV[2] then return 'LOST' end
  if r.state == 'COMPLETED' then return 'COMPLETED' end
  if r.state ~= 'CLAIMED' then return 'LOST' end
  note = r.note
end

local now = text(NOW)
redis.call('HSET', KEY, 'state', 'COMPLETED', 'attempts', '0', 'unknown', '0', 'lease_end', now, 'completed', now,
  'kind', ARGV[17])
if ARGV[18] == '1' then
  redis.call('HSET', KEY, 'body', ARGV[19], 'type', ARGV[20], 'encoding', ARGV[21], 'checksum', ARGV[22])
end
local expires = NOW + kept(tonumber(ARGV[7]))
if ARGV[5] == '1' then
  local until_ = NOW + tonumber(ARGV[6])
  note.continuing = {token = ARGV[2], fence = tonumber(ARGV[8]), holder = ARGV[9], ['until'] = until_}
  expires = math.max(expires, until_)
  put(message, note)
end
expire(expires)
return 'COMPLETED'
