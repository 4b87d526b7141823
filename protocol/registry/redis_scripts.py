"""Lua scripts of the Redis registry. Each script is one atomic step of Redis.

Keys, under a prefix per cluster:
- `…:member:<id>` hash of `owner`, `epoch`, `member` (JSON); it expires with its lease (PX);
- `…:members` set of the ids that may have a member, so that no script scans the key space;
- `…:epochs` hash of the last epoch of each id; it never expires;
- `…:changed` channel with a message after each change by a script. An expiry sends no message.

Epochs remain strings of digits, because Lua's numbers are doubles, exact up to 2**53 only.
"""

from __future__ import annotations

# KEYS: member, members, epochs, changed. ARGV: id, owner, last epoch known to the joiner, ttl in ms, JSON.
# Returns {1, epoch} or {0, ms left, JSON of the holder}. The new epoch is above the id's last one, the joiner's, and
# the time in ns. A server that lost its memory only has the joiner's epoch and the time.
JOIN = """
local function higher(a, b)
  if #a ~= #b then return #a > #b and a or b end
  return a > b and a or b
end
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[2] then
  return {0, redis.call('PTTL', KEYS[1]), redis.call('HGET', KEYS[1], 'member')}
end
local time = redis.call('TIME')
local now = time[1] .. string.format('%06d', time[2]) .. '000'
local last = redis.call('HGET', KEYS[3], ARGV[1]) or '0'
redis.call('HSET', KEYS[3], ARGV[1], higher(higher(last, ARGV[3]), now))
redis.call('HINCRBY', KEYS[3], ARGV[1], 1)
local epoch = redis.call('HGET', KEYS[3], ARGV[1])
redis.call('HSET', KEYS[1], 'owner', ARGV[2], 'epoch', epoch, 'member', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('PUBLISH', KEYS[4], ARGV[1])
return {1, epoch}
"""

# KEYS: member. ARGV: epoch, ttl in ms. Returns the holder's epoch; nil if there is none.
RENEW = """
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return epoch
"""

# KEYS: member, members, changed. ARGV: id, epoch.
LEAVE = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('PUBLISH', KEYS[3], ARGV[1])
return 1
"""

# KEYS: members, changed. ARGV: prefix of the member keys. Returns epoch, JSON, epoch, JSON, …
# The first caller that finds an expired lease notifies the other watchers.
MEMBERS = """
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local entry = redis.call('HMGET', ARGV[1] .. id, 'epoch', 'member')
  if entry[1] then
    found[#found + 1] = entry[1]
    found[#found + 1] = entry[2]
  else
    redis.call('SREM', KEYS[1], id)
    redis.call('PUBLISH', KEYS[2], id)
  end
end
return found
"""
