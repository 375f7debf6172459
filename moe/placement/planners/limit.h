// The search of moe/placement/planners/limit.py. Functions have the names and results of those in Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

namespace limit {

using Number = int64_t;

enum Kind : char { NONE, MAY, HELD, PINNED };
enum Reach : Number { THERE, IN_NODE, ANYWHERE };

struct Problem {
    Number experts, ranks, replica_slots, node, overhead, near, far;
    const Number *totals, *primaries;
    std::vector<char> kinds;  // by rank and expert
};

struct Spread {
    std::vector<Number> quotas;  // by rank and expert
    std::vector<Number> loads, used;
    std::vector<std::vector<Number>> experts;  // experts that each rank computes, ascending
};

struct Random {
    uint64_t state = 1;
    Number below(Number end) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<Number>((state >> 33) % static_cast<uint64_t>(end));
    }
};

using Score = std::tuple<Number, Number, Number>;

inline Number takes(const Problem& p, Number expert, Number rank) {
    return rank == p.primaries[expert] || p.kinds[rank * p.experts + expert] == PINNED ? 0 : 1;
}

inline void move(const Problem& p, Spread& s, Number expert, Number from, Number to, Number count) {
    if (count == 0) return;
    Number &source = s.quotas[from * p.experts + expert], &target = s.quotas[to * p.experts + expert];
    if (target == 0) {
        s.used[to] += takes(p, expert, to);
        s.experts[to].insert(std::lower_bound(s.experts[to].begin(), s.experts[to].end(), expert), expert);
    }
    source -= count, target += count;
    s.loads[from] -= count, s.loads[to] += count;
    if (source == 0) {
        s.used[from] -= takes(p, expert, from);
        s.experts[from].erase(std::lower_bound(s.experts[from].begin(), s.experts[from].end(), expert));
    }
}

inline bool augment(const Problem& p, Spread& s, Number most, Number reach, bool large) {
    std::vector<Number> width(p.ranks), size(p.ranks), before(p.ranks, -1), by(p.ranks, -1);
    std::vector<char> done(p.ranks, 0);
    for (Number r = 0; r < p.ranks; ++r) width[r] = std::max<Number>(s.loads[r] - most, 0);
    Number end = -1, amount = 0;
    for (;;) {
        Number from = -1;
        for (Number r = 0; r < p.ranks; ++r)
            if (!done[r] && width[r] > 0 && (from < 0 || width[r] > width[from])) from = r;
        if (from < 0 || width[from] < amount) break;
        done[from] = 1;
        const Number headroom = std::min(width[from], most - s.loads[from]);
        if (headroom > amount || (headroom > 0 && headroom == amount && s.loads[from] > s.loads[end]))
            end = from, amount = headroom;
        for (Number e : s.experts[from]) {
            const Number there = s.quotas[from * p.experts + e], now = std::min(width[from], there);
            const Number primary = p.primaries[e];
            for (Number to = 0; to < p.ranks; ++to) {
                if (done[to] || now < width[to] || (now == width[to] && (!size[to] || there <= size[to]))) continue;
                if (to != primary && s.quotas[to * p.experts + e] == 0) {
                    const char kind = p.kinds[to * p.experts + e];
                    if (kind == NONE || (kind != PINNED && (reach == THERE || s.used[to] >= p.replica_slots))) continue;
                    if (reach == IN_NODE && primary / p.node != to / p.node) continue;
                }
                width[to] = now, size[to] = large ? there : 0, before[to] = from, by[to] = e;
            }
        }
    }
    if (end < 0) return false;
    for (Number to = end; before[to] >= 0; to = before[to]) move(p, s, by[to], before[to], to, amount);
    const Number last = before[end];
    if (s.used[end] == p.replica_slots && s.used[last] < p.replica_slots)
        move(p, s, by[end], last, end, std::min(s.quotas[last * p.experts + by[end]], most - s.loads[end]));
    return true;
}

inline void fill(const Problem& p, Spread& s, Number most, bool near_first, bool large) {
    while (augment(p, s, most, THERE, large) || (near_first && augment(p, s, most, IN_NODE, large)) ||
           augment(p, s, most, ANYWHERE, large)) {
    }
}

inline Score score(const Problem& p, const Spread& s, Number most) {
    Number over = 0, seconds = 0, replicas = 0;
    std::vector<Number> work(p.ranks);
    for (Number r = 0; r < p.ranks; ++r) {
        over += std::max<Number>(s.loads[r] - most, 0);
        work[r] += s.loads[r] + p.overhead * static_cast<Number>(s.experts[r].size());
        for (Number e : s.experts[r]) {
            const Number primary = p.primaries[e];
            if (primary == r || p.kinds[r * p.experts + e] != MAY) continue;
            const Number cost = primary / p.node == r / p.node ? p.near : p.far;
            work[r] += cost, work[primary] += cost, ++replicas;
        }
    }
    for (Number each : work) seconds = std::max(seconds, each);
    return {over, seconds, replicas};
}

using Barred = std::vector<std::pair<Number, char>>;  // index of the kind, and its value before

inline Barred remove(Problem& p, Spread& s, Random& random) {
    std::vector<std::pair<Number, Number>> replicas;  // (rank, expert)
    Barred barred;
    for (Number r = 0; r < p.ranks; ++r)
        for (Number e : s.experts[r])
            if (p.primaries[e] != r) replicas.emplace_back(r, e);
    for (Number n = 1 + random.below(3); n > 0 && !replicas.empty(); --n) {
        Number chosen = random.below(replicas.size());
        if (random.below(2)) {
            const Number other = random.below(replicas.size());
            const auto count = [&](Number i) { return s.quotas[replicas[i].first * p.experts + replicas[i].second]; };
            if (count(other) < count(chosen)) chosen = other;
        }
        const auto [rank, expert] = replicas[chosen];
        const Number index = rank * p.experts + expert;
        move(p, s, expert, rank, p.primaries[expert], s.quotas[index]);
        if (random.below(2) && p.kinds[index] != PINNED)
            barred.emplace_back(index, std::exchange(p.kinds[index], NONE));
        replicas.erase(replicas.begin() + chosen);
    }
    return barred;
}

inline bool search(Problem& p, Spread& best, Number most, Number tries, Number polish) {
    Random random;
    fill(p, best, most, true, false);
    Spread now = best;
    Score least = score(p, best, most), current = least;
    while (std::get<0>(least) > 0 ? tries > 0 : polish > 0) {
        --(std::get<0>(least) > 0 ? tries : polish);
        Spread next = now;
        const Barred barred = remove(p, next, random);
        fill(p, next, most, std::get<0>(current) == 0, random.below(4) == 0);
        for (const auto& [index, kind] : barred) p.kinds[index] = kind;
        const Score found = score(p, next, most);
        if (found <= current || (std::get<0>(current) > 0 && random.below(8) == 0)) now = next, current = found;
        if (found < least) best = next, least = found;
    }
    return std::get<0>(least) == 0;
}

inline bool may_exist(const Problem& p, const std::vector<Number>& loads, Number most) {
    bool joined = p.far >= 0;
    for (Number r = 0; r < p.ranks; ++r)
        for (Number e = 0; e < p.experts; ++e)
            joined |= p.kinds[r * p.experts + e] != NONE && p.primaries[e] / p.node != r / p.node;
    const Number size = joined ? p.ranks : p.node;
    for (Number first = 0; first < p.ranks; first += size) {
        Number over = 0, headroom = 0;
        for (Number r = first; r < std::min(first + size, p.ranks); ++r) {
            over += std::max<Number>(loads[r] - most, 0);
            if (loads[r] >= most) continue;
            std::vector<Number> free;
            Number taken = 0, replica_slots = p.replica_slots;
            for (Number e = 0; e < p.experts; ++e) {
                const char kind = p.kinds[r * p.experts + e];
                if (kind == PINNED) taken += p.totals[e], --replica_slots;
                else if (kind != NONE) free.push_back(p.totals[e]);
            }
            std::sort(free.begin(), free.end(), std::greater<>());
            for (Number i = 0; i < replica_slots && i < static_cast<Number>(free.size()); ++i) taken += free[i];
            headroom += std::min(taken, most - loads[r]);
        }
        if (over > headroom) return false;
    }
    return true;
}

// Changes the spread to one that keeps the limit, or exceeds it by the least.
inline void keep(Problem& p, Spread& s, Number most, Number tries, Number fewer, Number polish) {
    Spread found = s;
    std::vector<Number> loads(p.ranks);
    for (Number e = 0; e < p.experts; ++e) loads[p.primaries[e]] += p.totals[e];
    const auto highest = [](const Spread& each) { return *std::max_element(each.loads.begin(), each.loads.end()); };
    if (may_exist(p, loads, most) && (search(p, found, most, tries, polish) || highest(found) < highest(s))) s = found;
    const Number mean = std::accumulate(loads.begin(), loads.end(), Number{0}) / p.ranks;
    for (Number low = most; highest(s) - low > 1 + mean / 1000;) {
        const Number middle = low + (highest(s) - low) / 2;
        found = s;
        if (may_exist(p, loads, middle) && search(p, found, middle, fewer, fewer)) s = found;
        else low = middle;
    }
}

}  // namespace limit
