"""Stand-in until the policy lands."""

from __future__ import annotations


class ExpertUses:
    def __init__(self, layers, num_experts):
        self.here = {}
        self.clock = 0

    def used(self, layer, experts):
        self.clock += 1
        for e in experts:
            if (layer, e) in self.here:
                self.here[layer, e] = self.clock

    def admit(self, place):
        self.here[place] = self.clock

    def drop(self, place):
        del self.here[place]

    def victim(self, protected):
        c = [p for p in self.here if p not in protected]
        return min(c, key=self.here.get) if c else None
