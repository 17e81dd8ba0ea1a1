-- decide_renew, for one claim. ARGV: as claim.lua, but 8 is the claim's fence; then answer, attempts, unknown,
-- '1' for a right to continue.

local message, lease_end, right = ARGV[3], NOW + tonumber(ARGV[6]), ARGV[17] == '1'
local r, bad = read(message, HEAD)
if bad then return {'CORRUPT', bad} end

if r and r.newer then return 'LOST' end
if not r or r.expires <= NOW then
  if right then return 'LOST' end
  if r then redis.call('DEL', KEY) end
  claimed(note_of(), tonumber(ARGV[8]), ARGV[14], tonumber(ARGV[15]), ARGV[16] == '1')
  return 'RENEWED'
end

local note = r.note
if note.continuing and note.continuing.token == ARGV[2] then
  note.continuing['until'] = lease_end
  put(message, note)
  if lease_end > r.expires then expire(lease_end) end
  return 'RENEWED'
end
if r.token ~= ARGV[2] then return note.settled and right and 'RENEWED' or 'LOST' end
if r.state == 'COMPLETED' and ARGV[5] == '1' and note.continuing then return 'LOST' end
if r.state == 'CLAIMED' then
  redis.call('HSET', KEY, 'lease_end', text(lease_end))
  expire(lease_end + kept(tonumber(ARGV[7])))
end
return 'RENEWED'
