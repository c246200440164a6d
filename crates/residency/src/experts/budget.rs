//! How many slots, and what that means for the model.

/// The experts of a model, in numbers that its header tells.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Bank {
    /// Experts of each layer that has any.
    pub experts: u64,
    /// Of these, how many a token is routed to.
    pub used: u64,
    /// Bytes of one expert, for each layer that has experts.
    pub expert_bytes: Vec<u64>,
    /// Bytes of a slot: slots are equal, with room for any expert.
    pub slot_bytes: u64,
}

impl Bank {
    /// All experts together.
    pub fn total_bytes(&self) -> u64 {
        self.expert_bytes.iter().sum::<u64>() * self.experts
    }

    /// The token cycle: what one token is routed to, in all layers.
    pub fn cycle_bytes(&self) -> u64 {
        self.expert_bytes.iter().sum::<u64>() * self.used
    }

    /// What one token is routed to in the widest layer.
    pub fn layer_bytes(&self) -> u64 {
        self.expert_bytes.iter().copied().max().unwrap_or(0) * self.used
    }

    /// Slots for all experts.
    pub fn slots_all(&self) -> u64 {
        self.experts * self.expert_bytes.len() as u64
    }

    /// Slots below which it does not work: what one token is routed to in a layer, and as much again that is read meanwhile.
    pub fn slots_min(&self) -> u64 {
        (2 * self.used).min(self.slots_all())
    }

    /// Slots that one token goes through: with fewer, an expert that two tokens in a row are routed to is not sure to be
    /// there for the second one.
    pub fn slots_cycle(&self) -> u64 {
        self.used * self.expert_bytes.len() as u64
    }

    /// The share of all experts that `slots` hold.
    pub fn share(&self, slots: u64) -> f64 {
        slots as f64 / self.slots_all().max(1) as f64
    }
}

/// How large a cache is wanted (`--cache-mb`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheSize {
    /// What the budget leaves, between floor and ceiling.
    #[default]
    Auto,
    /// At most so many bytes; 0 is the least that works.
    Bytes(u64),
    /// All experts.
    All,
}

/// What is wanted of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheAsk {
    /// `--cache-mb`.
    pub size: CacheSize,
    /// `--cache-ceil-mb`: the most that `Auto` takes.
    pub ceil_bytes: Option<u64>,
    /// `--cache-floor-mb`: the least that is worth running with.
    pub floor_bytes: Option<u64>,
}

/// A cache that cannot be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The budget leaves less than the least.
    #[error(
        "{free_bytes} bytes are left for experts, and {wanted_bytes} are the least: {slots} slots of {slot_bytes} bytes"
    )]
    TooSmall {
        /// What the budget leaves.
        free_bytes: u64,
        /// What is needed.
        wanted_bytes: u64,
        /// The same in slots.
        slots: u64,
        /// Bytes of a slot.
        slot_bytes: u64,
    },
    /// A floor above the ceiling, or above the size that was asked for.
    #[error("--cache-floor-mb asks for at least {floor_bytes} bytes, and at most {most_bytes} may be taken")]
    FloorAboveCeiling {
        /// The floor.
        floor_bytes: u64,
        /// The size or the ceiling.
        most_bytes: u64,
    },
}

impl CacheAsk {
    /// Slots for the experts of `bank` where the budget leaves `free_bytes` for them.
    pub fn slots(&self, bank: &Bank, free_bytes: u64) -> Result<u64, CacheError> {
        let slot_bytes = bank.slot_bytes.max(1);
        let floor = self.floor_bytes.unwrap_or(0);
        let most_bytes = match self.size {
            CacheSize::Auto => self.ceil_bytes.unwrap_or(u64::MAX),
            CacheSize::Bytes(bytes) => bytes,
            CacheSize::All => u64::MAX,
        };
        if floor > most_bytes {
            return Err(CacheError::FloorAboveCeiling { floor_bytes: floor, most_bytes });
        }
        let least = match self.size {
            CacheSize::All => bank.slots_all(),
            _ => floor.div_ceil(slot_bytes).max(bank.slots_min()).min(bank.slots_all()),
        };
        let wanted = match self.size {
            // What was asked for in bytes is taken or refused; only `Auto` looks at what is there.
            CacheSize::Bytes(bytes) => (bytes / slot_bytes).clamp(least, bank.slots_all()),
            _ => (most_bytes.min(free_bytes) / slot_bytes).clamp(least, bank.slots_all()),
        };
        if wanted * slot_bytes > free_bytes {
            let wanted_bytes = wanted * slot_bytes;
            return Err(CacheError::TooSmall { free_bytes, wanted_bytes, slots: wanted, slot_bytes });
        }
        Ok(wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn bank() -> Bank {
        Bank { experts: 8, used: 2, expert_bytes: vec![MIB, 2 * MIB, MIB], slot_bytes: 2 * MIB }
    }

    #[test]
    fn the_numbers_of_a_bank_follow_from_its_layers() {
        let bank = bank();
        assert_eq!((bank.total_bytes(), bank.cycle_bytes(), bank.layer_bytes()), (32 * MIB, 8 * MIB, 4 * MIB));
        assert_eq!((bank.slots_all(), bank.slots_min(), bank.slots_cycle()), (24, 4, 6));
    }

    #[test]
    fn a_size_is_taken_or_refused_with_the_numbers_and_auto_takes_what_is_there() {
        let slots = |size, ceil: Option<u64>, floor: Option<u64>, free: u64| {
            let ask = CacheAsk { size, ceil_bytes: ceil.map(|v| v * MIB), floor_bytes: floor.map(|v| v * MIB) };
            ask.slots(&bank(), free * MIB)
        };
        assert_eq!(slots(CacheSize::Bytes(0), None, None, 8), Ok(4), "the least that works");
        assert_eq!(slots(CacheSize::Bytes(21 * MIB), None, None, 100), Ok(10));
        assert_eq!(slots(CacheSize::Bytes(1 << 40), None, None, 100), Ok(24), "never more than all");
        assert_eq!(slots(CacheSize::All, None, None, 48), Ok(24));
        assert_eq!(slots(CacheSize::Auto, None, None, 21), Ok(10));
        assert_eq!(slots(CacheSize::Auto, Some(12), None, 21), Ok(6));
        assert_eq!(slots(CacheSize::Auto, None, Some(20), 21), Ok(10));
        let too_small = |wanted, free| {
            let wanted_bytes = wanted * 2 * MIB;
            Err(CacheError::TooSmall { free_bytes: free * MIB, wanted_bytes, slots: wanted, slot_bytes: 2 * MIB })
        };
        assert_eq!(slots(CacheSize::Bytes(0), None, None, 7), too_small(4, 7));
        assert_eq!(slots(CacheSize::Bytes(20 * MIB), None, None, 19), too_small(10, 19));
        assert_eq!(slots(CacheSize::All, None, None, 47), too_small(24, 47));
        assert_eq!(slots(CacheSize::Auto, None, Some(22), 21), too_small(11, 21));
        let crossed = CacheError::FloorAboveCeiling { floor_bytes: 9 * MIB, most_bytes: 8 * MIB };
        assert_eq!(slots(CacheSize::Auto, Some(8), Some(9), 100), Err(crossed));
        assert_eq!(slots(CacheSize::Bytes(8 * MIB), None, Some(9), 100), Err(crossed));
    }
}
