-- decide_settle. ARGV: now, message.

local r, bad = read(ARGV[2], HEAD)
if bad then return {'CORRUPT', bad} end
if not r or r.newer or r.expires <= NOW or r.state ~= 'COMPLETED' or r.note.settled then return 0 end
r.note.settled, r.note.continuing = true, nil
put(ARGV[2], r.note)
return 1
