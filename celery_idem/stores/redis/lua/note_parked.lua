-- decide_parked. ARGV: now, message, generation, count.

local generation, count = tonumber(ARGV[3]), tonumber(ARGV[4])
local r, bad = read(ARGV[2], HEAD)
if bad then return {'CORRUPT', bad} end
if not r or r.newer or r.expires <= NOW then return 0 end
local parked = r.note.parked
if parked and (parked[1] > generation or (parked[1] == generation and parked[2] >= count)) then return 0 end
r.note.parked = {generation, count}
put(ARGV[2], r.note)
return 1
