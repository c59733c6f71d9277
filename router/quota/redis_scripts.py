"""The rules of :mod:`router.quota.account` in Lua, which Redis runs as one atomic step.

An account is four keys. The braces make a Redis Cluster keep them together.

    {name}               hash: the fields of an account
    {name}:reservations  hash: tokens of each reservation, by id
    {name}:live          sorted set: ids of reservations, by the time at which they lapse
    {name}:lapsed        sorted set: ids of lapsed reservations, by the time at which they are forgotten
    {name}:charge:ID     a charge that was booked; it expires
"""

from __future__ import annotations

from router.quota.account import DAY_S, MINUTE_S, ROUNDING
from router.quota.limit_store import KEPT_S

LAPSED_AT_ONCE = 64

_ACCOUNT = """
local names = {'leaked_at_s', 'requests_spent', 'tokens_spent', 'day', 'used_today', 'month',
               'used_this_month', 'used_total', 'reserved'}

local function read(key)
    local values, account = redis.call('HMGET', key, unpack(names)), {}
    for i, name in ipairs(names) do
        account[name] = tonumber(values[i] or 0)
    end
    return account
end

local function write(key, account)
    local values = {}
    for _, name in ipairs(names) do
        values[#values + 1] = name
        values[#values + 1] = string.format('%.17g', account[name])
    end
    redis.call('HSET', key, unpack(values))
end

local function begin_periods(account, day, month)
    if day > account.day then
        account.day, account.used_today = day, 0
    end
    if month > account.month then
        account.month, account.used_this_month = month, 0
    end
end
"""

ADMIT = (
    _ACCOUNT
    + f"""
local MINUTE_S, DAY_S, KEPT_S, ROUNDING = {MINUTE_S}, {DAY_S}, {KEPT_S}, {ROUNDING:.10f}
local AT_ONCE = {LAPSED_AT_ONCE}
"""
    + """
local key, reservations, live, lapsed = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, num_tokens, lasts_s = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local limits = {}
for i, name in ipairs({'requests_per_minute', 'tokens_per_minute', 'tokens_per_day', 'tokens_per_month',
                       'tokens_total'}) do
    limits[name] = tonumber(ARGV[3 + i])  -- nil if there is none
end
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local account = read(key)

-- Reservations of processes that have died end here, and what is too old to be settled is forgotten.
for _, ended in ipairs(redis.call('ZRANGEBYSCORE', live, '-inf', now, 'LIMIT', 0, AT_ONCE)) do
    account.reserved = account.reserved - tonumber(redis.call('HGET', reservations, ended) or 0)
    redis.call('ZREM', live, ended)
    redis.call('ZADD', lapsed, now + KEPT_S, ended)
end
for _, old in ipairs(redis.call('ZRANGEBYSCORE', lapsed, '-inf', now, 'LIMIT', 0, AT_ONCE)) do
    redis.call('ZREM', lapsed, old)
    redis.call('HDEL', reservations, old)
end

local minutes = math.max(0, now - account.leaked_at_s) / MINUTE_S
account.leaked_at_s = math.max(now, account.leaked_at_s)
local function leaked(spent, per_minute)
    return per_minute and math.max(0, spent - per_minute * minutes) or 0
end
account.requests_spent = leaked(account.requests_spent, limits.requests_per_minute)
account.tokens_spent = leaked(account.tokens_spent, limits.tokens_per_minute)

local day = math.floor(now / DAY_S)
local shifted = day + 719468
local era, of_era = math.floor(shifted / 146097), shifted % 146097
local year_of_era = math.floor((of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524)
                                - math.floor(of_era / 146096)) / 365)
local of_year = of_era - (365 * year_of_era + math.floor(year_of_era / 4) - math.floor(year_of_era / 100))
begin_periods(account, day, 12 * (year_of_era + 400 * era) + math.floor((5 * of_year + 2) / 153) + 2)

local wanted, refused_by = account.reserved + num_tokens, ''
for _, check in ipairs({
    {'tokens_total', account.used_total + wanted},
    {'tokens_per_month', account.used_this_month + wanted},
    {'tokens_per_day', account.used_today + wanted},
    {'requests_per_minute', account.requests_spent + 1},
    {'tokens_per_minute', account.tokens_spent + num_tokens},
}) do
    local limit = limits[check[1]]
    if limit and check[2] > limit + ROUNDING then
        refused_by = check[1]
        break
    end
end
if refused_by == '' then
    if limits.requests_per_minute then
        account.requests_spent = account.requests_spent + 1
    end
    account.tokens_spent = account.tokens_spent + num_tokens
    account.reserved = account.reserved + num_tokens
    if num_tokens > 0 then
        redis.call('HSET', reservations, id, num_tokens)
        redis.call('ZADD', live, now + lasts_s, id)
    end
end
write(key, account)
local answer = {refused_by, string.format('%.17g', now)}
for i = 2, #names do
    answer[#answer + 1] = string.format('%.17g', account[names[i]])
end
return answer
"""
)
"""KEYS: the account, its reservations, live, lapsed. ARGV: id, tokens, seconds until it lapses, then the
limits in the order of :class:`KeyLimits`, each empty if there is none. Returns the name of the limit that
refuses, or nothing, and the values of a :class:`Standing`."""

SETTLE = (
    _ACCOUNT
    + """
local key, reservations, live, lapsed, charge = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local id, used, day, month = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local num_reserved = tonumber(redis.call('HGET', reservations, id) or nil)
local account = read(key)
if num_reserved then
    redis.call('HDEL', reservations, id)
    if redis.call('ZREM', live, id) == 1 then
        account.reserved = account.reserved - num_reserved
    end
    redis.call('ZREM', lapsed, id)
elseif ARGV[5] == '' and redis.call('SET', charge, '', 'NX', 'EX', tonumber(ARGV[6])) then
    num_reserved = 0
else
    return 0
end
account.tokens_spent = math.max(0, account.tokens_spent + used - num_reserved)
begin_periods(account, day, month)
if day == account.day then
    account.used_today = account.used_today + used
end
if month == account.month then
    account.used_this_month = account.used_this_month + used
end
account.used_total = account.used_total + used
write(key, account)
return 1
"""
)
"""KEYS: those of :data:`ADMIT`, and the charge's. ARGV: id, tokens, day, month, ``reserved`` or nothing, and
for how many seconds the charge is remembered. Returns whether anything was booked."""
