// The core of moe/placement/planners/solve.py. Functions have the names and results of those in Python.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "limit.h"

namespace {

using Number = int64_t;

struct Problem {
    Number experts, ranks, replica_slots, node, overhead, near, far, grad_near, grad_far, block;
    const Number *totals, *primaries;
    const Number *fresh_starts, *fresh_ranks;  // ranks with a replica by expert, ascending
    const Number* pinned;                      // whether these replicas have a slot of their own

    // The index of a replica among the existing ones; the end of its expert's range if there is none.
    Number find(Number expert, Number rank) const {
        const Number *first = fresh_ranks + fresh_starts[expert], *last = fresh_ranks + fresh_starts[expert + 1];
        return std::find(first, last, rank) - fresh_ranks;
    }
    bool is_fresh(Number expert, Number rank) const { return find(expert, rank) < fresh_starts[expert + 1]; }
    // The cost of returning the gradients of a replica's blocks; 0 if a replica returns its gradient once.
    Number blocks(Number expert, Number rank, Number count) const {
        if (block == 0) return 0;
        return (primaries[expert] / node == rank / node ? grad_near : grad_far) * ((count + block - 1) / block);
    }
    Number takes(Number expert, Number rank) const { return !is_fresh(expert, rank) || !pinned[find(expert, rank)]; }
};

struct Replica {
    Number expert, rank, count;
    bool is_new;
    Number takes;  // replica slots
};

struct Attempt {
    std::vector<Number> left;  // assignments of each expert on its primary
    std::vector<Number> work, used;
    std::vector<Replica> replicas;
};

Attempt at_primaries(const Problem& p) {
    Attempt a{std::vector<Number>(p.totals, p.totals + p.experts), std::vector<Number>(p.ranks),
              std::vector<Number>(p.ranks), {}};
    for (Number e = 0; e < p.experts; ++e)
        if (p.totals[e] > 0) a.work[p.primaries[e]] += p.totals[e] + p.overhead;
    for (Number i = 0; i < p.fresh_starts[p.experts]; ++i) a.used[p.fresh_ranks[i]] += p.pinned[i];
    return a;
}

using Ranks = std::vector<Number>;

void give(const Problem& p, Attempt& a, Replica& replica, Number count) {
    const Number primary = p.primaries[replica.expert];
    if (a.left[replica.expert] == 0) a.work[primary] += p.overhead;  // its primary computes it again
    a.left[replica.expert] -= count;
    a.work[primary] -= count + (a.left[replica.expert] == 0 ? p.overhead : 0);
    if (replica.count == 0) a.used[replica.rank] += replica.takes, a.work[replica.rank] += p.overhead;
    replica.count += count;
    a.work[replica.rank] += count;
    if (replica.count == 0) a.used[replica.rank] -= replica.takes, a.work[replica.rank] -= p.overhead;
}

// Augmenting paths (Edmonds and Karp 1972) from ranks above the threshold to ranks with headroom: over a replica to its
// rank, or back from a replica's rank to its primary.
void use_fresh(const Problem& p, Attempt& a, Number threshold) {
    std::vector<std::vector<Number>> by_primary(p.ranks), at_rank(p.ranks);
    for (Number e = 0; e < p.experts; ++e)
        for (Number i = p.fresh_starts[e]; i < p.fresh_starts[e + 1]; ++i) {
            by_primary[p.primaries[e]].push_back(a.replicas.size());
            at_rank[p.fresh_ranks[i]].push_back(a.replicas.size());
            a.replicas.push_back({e, p.fresh_ranks[i], 0, false, !p.pinned[i]});
        }
    for (Number tries = 4 * a.replicas.size(); tries > 0; --tries) {
        std::vector<Number> over(p.ranks, -2);  // the replica over which the path reaches a rank; -1: it starts here
        std::vector<Number> queue;
        for (Number r = 0; r < p.ranks; ++r)
            if (a.work[r] > threshold) over[r] = -1, queue.push_back(r);
        Number end = -1, headroom = 0;
        const auto reach = [&](Number rank, Number index, Number needed) {
            if (over[rank] != -2) return;
            over[rank] = index;
            queue.push_back(rank);
            if (end < 0 && a.work[rank] + needed < threshold) end = rank, headroom = threshold - needed - a.work[rank];
        };
        for (size_t next = 0; next < queue.size() && end < 0; ++next) {
            for (Number index : by_primary[queue[next]]) {
                const Replica& replica = a.replicas[index];
                if (a.left[replica.expert] > 0) reach(replica.rank, index, replica.count == 0 ? p.overhead : 0);
            }
            for (Number index : at_rank[queue[next]]) {
                const Replica& replica = a.replicas[index];
                if (replica.count > 0)
                    reach(p.primaries[replica.expert], index, a.left[replica.expert] == 0 ? p.overhead : 0);
            }
        }
        if (end < 0) break;
        std::vector<std::pair<Number, bool>> path;  // replicas, and whether they take assignments
        Number amount = headroom, rank = end;
        while (over[rank] != -1) {
            const Replica& replica = a.replicas[over[rank]];
            const bool takes = replica.rank == rank;
            path.emplace_back(over[rank], takes);
            amount = std::min(amount, takes ? a.left[replica.expert] : replica.count);
            rank = takes ? p.primaries[replica.expert] : replica.rank;
        }
        amount = std::min(amount, a.work[rank] - threshold);
        for (const auto& [index, takes] : path) give(p, a, a.replicas[index], takes ? amount : -amount);
    }
}

void add_new(const Problem& p, Attempt& a, const std::vector<std::vector<Number>>& experts_of, const Ranks& donors,
             Number threshold) {
    std::vector<std::vector<Number>> holds(p.experts);
    for (const Replica& replica : a.replicas) holds[replica.expert].push_back(replica.rank);
    for (Number donor : donors) {
        if (a.work[donor] <= threshold) continue;
        std::vector<Number> experts = experts_of[donor];
        const Number first = donor / p.node * p.node, end = std::min(first + p.node, p.ranks);
        while (a.work[donor] > threshold && !experts.empty()) {
            Number which = 0;
            for (Number i = 1; i < static_cast<Number>(experts.size()); ++i)
                if (a.left[experts[i]] > a.left[experts[which]]) which = i;
            const Number expert = experts[which], wanted = std::min(a.work[donor] - threshold, a.left[expert]);
            Number cost = p.near;
            const auto search = [&](Number from, Number to) {
                Number exact = -1, filled = -1, last = -1;
                for (Number r = from; r < to; ++r) {
                    const Number headroom = threshold - p.overhead - a.work[r];
                    if (headroom <= cost || r == donor) continue;
                    if (a.used[r] >= p.replica_slots && p.takes(expert, r)) continue;
                    if (std::find(holds[expert].begin(), holds[expert].end(), r) != holds[expert].end()) continue;
                    if (headroom < wanted) {
                        if (filled < 0 || std::pair(-a.used[r], a.work[r]) < std::pair(-a.used[filled], a.work[filled]))
                            filled = r;
                        continue;
                    }
                    Number& fits = a.used[r] + 2 <= p.replica_slots || headroom == wanted ? exact : last;
                    if (fits < 0 || a.work[r] > a.work[fits]) fits = r;
                }
                return exact >= 0 ? exact : filled >= 0 ? filled : last;
            };
            Number target = search(first, end);
            if (target < 0 && p.far >= 0) {
                cost = p.far;
                target = search(0, p.ranks);
            }
            const Number count = target < 0 ? 0 : std::min(wanted, threshold - p.overhead - a.work[target]);
            if (count <= cost + (target < 0 ? 0 : p.blocks(expert, target, count)) +
                             (count < a.left[expert] ? p.overhead : 0)) {
                experts.erase(experts.begin() + which);
                continue;
            }
            a.replicas.push_back({expert, target, 0, !p.is_fresh(expert, target), p.takes(expert, target)});
            give(p, a, a.replicas.back(), count);
            holds[expert].push_back(target);
        }
    }
}

Number most_of(const Attempt& a) { return *std::max_element(a.work.begin(), a.work.end()); }

Number mean_of(const Problem& p, const Ranks& work) {
    const Number size = p.far >= 0 ? p.ranks : p.node;
    Number most = 0;
    for (Number first = 0; first < p.ranks; first += size) {
        const Number end = std::min(first + size, p.ranks);
        const Number sum = std::accumulate(work.begin() + first, work.begin() + end, Number{0});
        most = std::max(most, (sum + end - first - 1) / (end - first));
    }
    return most;
}

void keep_limit(const Problem& p, Attempt& a, Number most, Number tries, Number fewer, Number polish) {
    limit::Problem of{p.experts, p.ranks, p.replica_slots, p.node,      p.overhead,
                      p.near,    p.far,   p.totals,        p.primaries, {}};
    of.kinds.assign(p.ranks * p.experts, limit::NONE);
    limit::Spread s{Ranks(p.ranks * p.experts), Ranks(p.ranks), Ranks(p.ranks), std::vector<Ranks>(p.ranks)};
    for (Number e = 0; e < p.experts; ++e) {
        for (Number r = 0; r < p.ranks; ++r)
            if (r != p.primaries[e] && (p.far >= 0 || r / p.node == p.primaries[e] / p.node))
                of.kinds[r * p.experts + e] = limit::MAY;
        for (Number i = p.fresh_starts[e]; i < p.fresh_starts[e + 1]; ++i) {
            of.kinds[p.fresh_ranks[i] * p.experts + e] = p.pinned[i] ? limit::PINNED : limit::HELD;
            s.used[p.fresh_ranks[i]] += p.pinned[i];
        }
        if (p.totals[e] == 0) continue;
        s.quotas[p.primaries[e] * p.experts + e] = p.totals[e];
        s.loads[p.primaries[e]] += p.totals[e];
        s.experts[p.primaries[e]].push_back(e);
    }
    for (const Replica& replica : a.replicas)
        limit::move(of, s, replica.expert, p.primaries[replica.expert], replica.rank, replica.count);
    limit::keep(of, s, most, tries, fewer, polish);
    a = at_primaries(p);
    for (Number r = 0; r < p.ranks; ++r)
        for (Number e : s.experts[r]) {
            if (p.primaries[e] == r) continue;
            a.replicas.push_back({e, r, 0, !p.is_fresh(e, r), p.takes(e, r)});
            give(p, a, a.replicas.back(), s.quotas[r * p.experts + e]);
        }
}

struct Score {
    Number over, seconds, replicas;
    bool operator<(const Score& other) const {
        return std::tie(over, seconds, replicas) < std::tie(other.over, other.seconds, other.replicas);
    }
};

Score score(const Problem& p, const Attempt& a, Number most) {
    std::vector<Number> load(p.ranks), copying(p.ranks);
    for (Number e = 0; e < p.experts; ++e) load[p.primaries[e]] += a.left[e];
    Number replicas = 0;
    for (const Replica& replica : a.replicas) {
        load[replica.rank] += replica.count;
        const Number primary = p.primaries[replica.expert], near = primary / p.node == replica.rank / p.node;
        const Number fetch = replica.is_new ? (near ? p.near : std::max<Number>(p.far, 0)) : 0;
        const Number cost = fetch + p.blocks(replica.expert, replica.rank, replica.count);
        copying[primary] += cost;
        copying[replica.rank] += cost;
        replicas += replica.is_new;
    }
    Number over = 0, seconds = 0;
    for (Number r = 0; r < p.ranks; ++r) {
        if (most >= 0) over = std::max(over, load[r] - most);
        seconds = std::max(seconds, a.work[r] + copying[r]);
    }
    return {over, seconds, replicas};
}

}  // namespace

// Returns the number of replicas with assignments: triples (expert, rank, count) in `replicas`, those of primaries in
// `left`.
extern "C" Number mixtrain_placement(Number experts, Number ranks, Number replica_slots, Number node, Number overhead,
                                     Number near, Number far, Number grad_near, Number grad_far, Number block,
                                     Number most,
                                     const Number* totals, const Number* primaries,
                                     const Number* fresh_starts, const Number* fresh_ranks, const Number* pinned,
                                     const Number* steps, Number num_steps, Number rounds, Number enough,
                                     Number patience, Number tries, Number fewer, Number polish, Number* left,
                                     Number* replicas) {
    const Problem p{experts,  ranks, replica_slots, node,      overhead,     near,        far,   grad_near,
                    grad_far, block, totals,        primaries, fresh_starts, fresh_ranks, pinned};
    const Attempt primary = at_primaries(p);
    Attempt best = primary;
    const Number base = mean_of(p, primary.work);
    const Number highest = *std::max_element(primary.work.begin(), primary.work.end());
    Score least = score(p, best, most);
    const auto keep_if_less = [&](const Attempt& attempt) {
        const Score now = score(p, attempt, most);
        if (now < least) {
            least = now;
            best = attempt;
        }
    };
    std::vector<std::vector<Number>> experts_of(ranks);
    for (Number e = 0; e < experts; ++e)
        if (totals[e] > 0) experts_of[primaries[e]].push_back(e);
    for (auto& own : experts_of)
        std::stable_sort(own.begin(), own.end(), [&](Number x, Number y) { return totals[x] > totals[y]; });
    Ranks falling(ranks), rising;
    std::iota(falling.begin(), falling.end(), Number{0});
    std::stable_sort(falling.begin(), falling.end(),
                     [&](Number x, Number y) { return primary.work[x] > primary.work[y]; });
    rising.assign(falling.rbegin(), falling.rend());
    std::vector<Number> thresholds;
    std::vector<Attempt> of_fresh;
    for (Number step = 0; step < num_steps; ++step) {
        const Number threshold = base + base * steps[step] / 1000;
        if (threshold >= highest) break;
        thresholds.push_back(threshold);
        of_fresh.push_back(primary);
        use_fresh(p, of_fresh.back(), threshold);
        keep_if_less(of_fresh.back());
        if (most_of(of_fresh.back()) <= threshold) break;
    }
    const bool is_enough = least.over <= 0 && least.seconds <= base + base * enough / 1000;
    Number misses = 0;
    for (size_t i = of_fresh.size(); i-- > 0 && !is_enough && misses < patience;) {
        if (least.over <= 0 && thresholds[i] >= least.seconds) continue;
        const Score earlier = least;
        for (bool from_primaries : {false, true}) {
            if (!from_primaries && fresh_starts[experts] == 0) continue;
            bool is_reached = false;
            for (const Ranks* start : {&falling, &rising}) {
                Ranks donors = *start;
                Number before = -1;
                for (Number round = 0; round < rounds && !is_reached; ++round) {
                    Attempt attempt = from_primaries ? primary : of_fresh[i];
                    add_new(p, attempt, experts_of, donors, thresholds[i]);
                    keep_if_less(attempt);
                    const Number now = most_of(attempt);
                    is_reached = now <= thresholds[i];
                    if (now == before) break;
                    before = now;
                    std::stable_partition(donors.begin(), donors.end(),
                                          [&](Number r) { return attempt.work[r] > thresholds[i]; });
                }
            }
        }
        misses = least < earlier ? 0 : misses + 1;
    }
    if (least.over > 0) {
        Attempt attempt = best;
        keep_limit(p, attempt, most, tries, fewer, polish);
        keep_if_less(attempt);
    }
    std::copy(best.left.begin(), best.left.end(), left);
    Number* out = replicas;
    for (const Replica& replica : best.replicas) {
        if (replica.count == 0) continue;
        *out++ = replica.expert;
        *out++ = replica.rank;
        *out++ = replica.count;
    }
    return (out - replicas) / 3;
}
