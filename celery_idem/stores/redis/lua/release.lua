-- decide_release. ARGV: now, token, message, generation, ttl, reason, successor's generation or '', its delay or ''.

local message = ARGV[3]
local r, bad = read(message, HEAD)
if bad then return {'CORRUPT', bad} end
if not r or r.newer or r.token ~= ARGV[2] then return 'LOST' end
if r.state ~= 'CLAIMED' then return r.state end

local note, reason, stays = r.note, ARGV[6], math.max(tonumber(ARGV[5]), DAY)
redis.call('HSET', KEY, 'state', 'RELEASED', 'attempts', '0', 'unknown', flag(r.unknown or reason == 'INTERRUPTED'),
  'lease_end', text(NOW))
if reason == 'RETRY' and ARGV[7] ~= '' then
  stays = math.max(stays, tonumber(ARGV[8]) + GRACE)
  note.successor = {tonumber(ARGV[7]), NOW + tonumber(ARGV[8])}
  put(message, note)
elseif reason == 'ENDED' then
  note.over = math.max(note.over, tonumber(ARGV[4]))
  put(message, note)
end
expire(NOW + stays)
return 'RELEASED'
