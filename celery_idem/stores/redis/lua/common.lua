-- The prelude of every script: the record in KEYS[1] and the parts of core/decide.py they share.
-- VERSION, DAY, GRACE and KEPT precede this text; they come from core/records.py.
-- Numbers travel as text that reads back to the same double, so both spellings reckon alike to the last bit.

local KEY, NOW, US, SLACK = KEYS[1], nil, nil, 0
if ARGV[1] == '' then
  local time = redis.call('TIME')
  US = time[1] * 1000000 + time[2]
  NOW = US / 1000000
else
  NOW = tonumber(ARGV[1])
  US = math.floor(NOW * 1000000)
  SLACK = 3600000 -- the server's clock must not drop what the injected one still shows
end

local FIELDS = {
  'v', 'state', 'token', 'fence', 'message', 'generation', 'attempts', 'answer', 'unknown', 'task', 'namespace',
  'scope', 'fingerprint', 'holder', 'claimed', 'lease_end', 'expires', 'completed', 'kind', 'body', 'type',
  'encoding', 'checksum',
}
local ALWAYS, HEAD, EXPIRES = 17, 19, 17 -- fields every record has; all but the body; where "expires" is

local function text(number) return string.format('%.17g', number) end
local function whole(number) return string.format('%.0f', number) end
local function flag(value) return value and '1' or '0' end
local function kept(ttl) return ttl > 0 and ttl or DAY end
local function finite(n) return type(n) == 'number' and n == n and n > -math.huge and n < math.huge end
local function integer(n) return finite(n) and n == math.floor(n) end

local function integer_of(s) return s and #s <= 17 and string.match(s, '^-?%d+$') and tonumber(s) end
local function number_of(s)
  local n = s and string.match(s, '^[%d.eE+-]+$') and tonumber(s)
  return finite(n) and n or nil
end

local function pair_ok(p) return p == nil or (type(p) == 'table' and integer(p[1]) and finite(p[2])) end

local function right_ok(r)
  return r == nil or (type(r) == 'table' and type(r.token) == 'string' and type(r.holder) == 'string'
    and integer(r.fence) and finite(r['until']))
end

-- The note as a table, a blank one for no text, nil for text that is none.
local function note_of(json)
  if not json then return {over = -1, settled = false, at = 0} end
  local read, note = pcall(cjson.decode, json)
  if not read or type(note) ~= 'table' then return nil end
  if note.settled == nil then note.settled = false end
  if not (integer(note.over) and finite(note.at) and type(note.settled) == 'boolean') then return nil end
  if not (pair_ok(note.successor) and pair_ok(note.parked) and right_ok(note.continuing)) then return nil end
  if note.parked and not integer(note.parked[2]) then return nil end
  return note
end

-- Written by hand: cjson rounds numbers to 14 digits, and a fence has 16.
local function json_of(note)
  local parts = {'"over":' .. whole(note.over)}
  local function add(part) parts[#parts + 1] = part end
  if note.successor then
    add('"successor":[' .. whole(note.successor[1]) .. ',' .. text(note.successor[2]) .. ']')
  end
  if note.parked then add('"parked":[' .. whole(note.parked[1]) .. ',' .. whole(note.parked[2]) .. ']') end
  local right = note.continuing
  if right then
    add('"continuing":{"token":' .. cjson.encode(right.token) .. ',"fence":' .. whole(right.fence)
      .. ',"holder":' .. cjson.encode(right.holder) .. ',"until":' .. text(right['until']) .. '}')
  end
  if note.settled then add('"settled":true') end
  add('"at":' .. text(note.at))
  return '{' .. table.concat(parts, ',') .. '}'
end

local STATES = {CLAIMED = true, COMPLETED = true, RELEASED = true}
local ANSWERS = {ACQUIRED = true, RECLAIMED = true, COMPLETED = true}
local KINDS = {RESULT = true, FAILURE = true, IGNORED = true, REPLACED = true}

-- The first of the fields that cannot be read, or nil. Written out: every claim pays for it, and a loop costs more.
local function unreadable(h)
  return not STATES[h[2]] and 'state' or not h[3] and 'token' or not integer_of(h[4]) and 'fence'
    or not h[5] and 'message' or not integer_of(h[6]) and 'generation' or not integer_of(h[7]) and 'attempts'
    or not ANSWERS[h[8]] and 'answer' or h[9] ~= '0' and h[9] ~= '1' and 'unknown'
    or not h[10] and 'task' or not h[11] and 'namespace' or not h[12] and 'scope' or not h[13] and 'fingerprint'
    or not h[14] and 'holder' or not number_of(h[15]) and 'claimed' or not number_of(h[16]) and 'lease_end'
    or not number_of(h[17]) and 'expires' or h[18] and not number_of(h[18]) and 'completed'
    or (h[19] or h[2] == 'COMPLETED') and not KINDS[h[19]] and 'kind' or nil
end

-- The record and this message's note, from the first `last` fields; nil for none; nil and a field's name where
-- that field cannot be read. Of a newer record only `newer`, `token` and `expires` are known.
local function read(message, last)
  local names = {unpack(FIELDS, 1, last)}
  if message then names[last + 1] = 'm:' .. message end
  local h = redis.pcall('HMGET', KEY, unpack(names))
  if h.err then
    if string.find(h.err, 'WRONGTYPE', 1, true) then return nil, 'type' end
    redis.call('HMGET', KEY, 'v') -- raises whatever else it was
  end
  if not h[1] then
    if redis.call('EXISTS', KEY) == 1 then return nil, 'v' end
    return nil
  end
  local version = integer_of(h[1])
  if not version then return nil, 'v' end
  if version > VERSION then
    return {newer = true, token = h[3], fence = integer_of(h[4]), expires = number_of(h[EXPIRES]) or math.huge, raw = h}
  end
  local bad = unreadable(h)
  if bad then return nil, bad end
  local note = note_of(message and h[last + 1])
  if not note then return nil, 'm:' .. message end
  return {
    state = h[2], token = h[3], fence = tonumber(h[4]), message = h[5], attempts = tonumber(h[7]), answer = h[8],
    unknown = h[9] == '1', fingerprint = h[13], lease_end = tonumber(h[16]), expires = tonumber(h[EXPIRES]),
    note = note, raw = h,
  }
end

-- "expires" and the key's own expiry, never one without the other.
local function expire(at)
  redis.call('HSET', KEY, 'expires', text(at))
  local left = math.min(math.max(math.ceil((at - NOW) * 1000), 1) + SLACK, 1e15)
  redis.call('PEXPIRE', KEY, whole(left))
end

local function live(note)
  if note.continuing and note.continuing['until'] > NOW then return true end
  return note.successor ~= nil and note.successor[2] + GRACE > NOW
end

-- decide._noted: the oldest dead notes beyond the limit are dropped.
local function prune(message)
  if redis.call('HLEN', KEY) <= KEPT + ALWAYS then return end
  local all, dead = 0, {}
  for _, name in ipairs(redis.call('HKEYS', KEY)) do
    if string.sub(name, 1, 2) == 'm:' then
      all = all + 1
      if name ~= 'm:' .. message then
        local note = note_of(redis.call('HGET', KEY, name)) or {at = -math.huge}
        if not live(note) then dead[#dead + 1] = {note.at, name} end
      end
    end
  end
  table.sort(dead, function(a, b)
    if a[1] ~= b[1] then return a[1] < b[1] end
    return a[2] < b[2]
  end)
  for i = 1, math.min(all - KEPT, #dead) do
    redis.call('HDEL', KEY, dead[i][2])
  end
end

local function put(message, note)
  note.at = NOW
  local json = json_of(note)
  redis.call('HSET', KEY, 'm:' .. message, json)
  prune(message)
  return json
end

local function next_fence(previous) return math.max(previous + 1, US) end

-- decide._claimed: ARGV 2..13 become the claim. Returns the note's text where it has one.
local function claimed(note, fence, answer, attempts, unknown, json)
  local message, generation = ARGV[3], tonumber(ARGV[4])
  local lease_end = NOW + tonumber(ARGV[6])
  redis.call('HSET', KEY, 'v', VERSION, 'state', 'CLAIMED', 'token', ARGV[2], 'fence', whole(fence),
    'message', message, 'generation', ARGV[4], 'attempts', whole(attempts), 'answer', answer,
    'unknown', flag(unknown), 'task', ARGV[10], 'namespace', ARGV[11], 'scope', ARGV[12], 'fingerprint', ARGV[13],
    'holder', ARGV[9], 'claimed', text(NOW), 'lease_end', text(lease_end))
  expire(lease_end + kept(tonumber(ARGV[7])))
  local over = math.max(note.over, generation - 1)
  local passed = note.successor and note.successor[1] <= generation
  if over == note.over and not passed then return json end
  note.over = over
  if passed then note.successor = nil end
  return put(message, note)
end
