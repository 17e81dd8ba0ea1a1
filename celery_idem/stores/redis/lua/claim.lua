-- decide_claim. ARGV: now, token, message, generation, continues, lease, ttl, dead fence or '', holder, task,
-- namespace, scope, fingerprint.
-- Answers {answer, now, 'TAKEN', fence, attempts, unknown, note} or {answer, now, 'STANDS' | 'OWN' | 'RIGHT', fields, others}.

local token, message, generation, continues = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1'
local dead = tonumber(ARGV[8])
local r, bad = read(message, #FIELDS)
if bad then return {'CORRUPT', bad} end

-- The last word: '1' where other messages have notes too (or a newer release has fields of its own).
local function stand(answer, how)
  local shown = 0
  for i = 1, #FIELDS + 1 do if r.raw[i] then shown = shown + 1 end end
  return {answer, text(NOW), how or 'STANDS', r.raw, flag(redis.call('HLEN', KEY) > shown)}
end

local function take(answer, attempts, unknown, fence, note, json)
  local noted = claimed(note, fence, answer, attempts, unknown, json)
  return {answer, text(NOW), 'TAKEN', whole(fence), whole(attempts), flag(unknown), noted or false}
end

if r and r.newer then return stand('NEWER') end
if not r then return take('ACQUIRED', 1, false, next_fence(0), note_of()) end
if r.expires <= NOW then
  redis.call('DEL', KEY)
  return take('ACQUIRED', 1, false, next_fence(r.fence), note_of())
end

local note, json = r.note, r.raw[#FIELDS + 1]
local right = note.continuing
if r.state == 'CLAIMED' and r.token == token then return stand(r.answer, 'OWN') end
if r.state == 'COMPLETED' and right and right.token == token then return stand('COMPLETED', 'RIGHT') end
if generation <= note.over then return stand('OVER') end
if r.state ~= 'RELEASED' and r.message ~= message and ARGV[13] ~= '' and r.fingerprint ~= ''
  and ARGV[13] ~= r.fingerprint then
  return stand('MISMATCH')
end
if r.state == 'CLAIMED' then
  if r.lease_end > NOW and dead ~= r.fence then return stand('HELD') end
  return take('RECLAIMED', r.attempts + 1, true, next_fence(r.fence), note, json)
end
if r.state == 'RELEASED' then
  local successor = note.successor
  if successor and successor[1] > generation and NOW < successor[2] + GRACE then return stand('NOT_DUE') end
  return take(r.unknown and 'RECLAIMED' or 'ACQUIRED', 1, r.unknown, next_fence(r.fence), note, json)
end
if not continues or note.settled then return stand('COMPLETED') end
if right and right['until'] > NOW and dead ~= right.fence then return stand('HELD') end

local until_ = NOW + tonumber(ARGV[6])
local fence = next_fence(math.max(r.fence, right and right.fence or 0))
note.continuing = {token = token, fence = fence, holder = ARGV[9], ['until'] = until_}
r.raw[#FIELDS + 1] = put(message, note)
if until_ > r.expires then
  expire(until_)
  r.raw[EXPIRES] = text(until_)
end
return stand('COMPLETED', 'RIGHT')
