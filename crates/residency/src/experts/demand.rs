//! What a cache of experts will be worth, before it has run.

use super::Bank;

/// Hits by the share of experts in memory, for 128 experts of which a token takes 8, as published for caches of this kind.
/// Our own order of eviction hits somewhat more on the same recordings, so this errs on the slow side.
const HITS: [(f64, f64); 8] =
    [(0.0, 0.0), (0.05, 0.34), (0.12, 0.58), (0.20, 0.74), (0.30, 0.84), (0.45, 0.93), (0.64, 0.97), (1.0, 1.0)];

/// The share of hits to be expected with `share` of the experts in memory.
pub fn expected_hits(share: f64) -> f64 {
    let pairs = HITS.windows(2).find(|pair| share <= pair[1].0);
    pairs.map_or(1.0, |pair| {
        let ((x0, y0), (x1, y1)) = (pair[0], pair[1]);
        y0 + (y1 - y0) * (share.max(0.0) - x0) / (x1 - x0)
    })
}

impl Bank {
    /// Bytes that a token reads with `slots` slots.
    pub fn expected_read_bytes(&self, slots: u64) -> u64 {
        ((1.0 - expected_hits(self.share(slots))) * self.cycle_bytes() as f64) as u64
    }

    /// Bytes of the experts that a prompt of `tokens` tokens goes through, if its tokens choose as if by chance: real ones
    /// choose fewer.
    pub fn prompt_bytes(&self, tokens: u64) -> u64 {
        let missed = (1.0 - self.used as f64 / self.experts.max(1) as f64).powf(tokens as f64);
        ((1.0 - missed) * self.total_bytes() as f64) as u64
    }

    /// Slots at which speed is worth telling: a token's worth, then shares of all, ascending.
    pub fn steps(&self) -> Vec<u64> {
        let shares = [0.12, 0.2, 0.3, 0.45, 0.64, 1.0].map(|share| (share * self.slots_all() as f64).ceil() as u64);
        let mut steps: Vec<u64> = [self.slots_min(), self.slots_cycle()].into_iter().chain(shares).collect();
        steps.sort_unstable();
        steps.dedup();
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_slots_are_never_worth_less_and_all_of_them_read_nothing() {
        let bank = Bank { experts: 128, used: 8, expert_bytes: vec![3 << 20; 20], slot_bytes: 3 << 20 };
        let bytes: Vec<u64> = (0..=bank.slots_all()).map(|slots| bank.expected_read_bytes(slots)).collect();
        assert!(bytes.windows(2).all(|b| b[1] <= b[0]));
        assert_eq!((bytes[0], bytes[bytes.len() - 1]), (bank.cycle_bytes(), 0));
        assert!((expected_hits(0.16) - 0.66).abs() < 1e-9 && expected_hits(2.0) == 1.0);
        assert!(bank.prompt_bytes(1) >= bank.cycle_bytes() * 99 / 100 && bank.prompt_bytes(512) <= bank.total_bytes());
        assert!(bank.prompt_bytes(512) > bank.total_bytes() * 99 / 100);
        let steps = bank.steps();
        assert!(steps.windows(2).all(|s| s[0] < s[1]) && steps.last() == Some(&bank.slots_all()), "{steps:?}");
    }
}
