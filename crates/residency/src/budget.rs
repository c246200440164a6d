//! The ledger: every byte that the process holds for its work is granted here before it exists.
//!
//! A [`Grant`] is a right to bytes of one line for one owner; dropping it gives them back. The sum of all grants never
//! exceeds the budget, except for what [`Ledger::charge_unavoidable`] records, which exists already.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What bytes are held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Line {
    /// Weight matrices that stay.
    Weights,
    /// Slots of experts.
    Experts,
    /// Keys and values of sessions.
    Kv,
    /// Keys and values that no session holds.
    PrefixCache,
    /// Activations, logits, rotation tables.
    Scratch,
    /// Buffers that files are read into.
    Io,
    /// Header, tokenizer, template.
    Metadata,
    /// The process itself: code, stacks, allocator.
    Base,
}

impl Line {
    /// Every line, in the order of reports.
    pub const ALL: &[Line] = &[
        Line::Weights,
        Line::Experts,
        Line::Kv,
        Line::PrefixCache,
        Line::Scratch,
        Line::Io,
        Line::Metadata,
        Line::Base,
    ];

    /// The word in reports and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Line::Weights => "weights",
            Line::Experts => "experts",
            Line::Kv => "kv",
            Line::PrefixCache => "prefix_cache",
            Line::Scratch => "scratch",
            Line::Io => "io",
            Line::Metadata => "metadata",
            Line::Base => "base",
        }
    }
}

/// There is no room: a state of affairs, not a fault. Bytes may become free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full {
    /// Bytes asked for.
    pub wanted_bytes: u64,
    /// Bytes that were free.
    pub free_bytes: u64,
    /// All bytes.
    pub budget_bytes: u64,
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Full { wanted_bytes, free_bytes, budget_bytes } = self;
        write!(f, "{wanted_bytes} bytes are wanted and {free_bytes} of the budget of {budget_bytes} bytes are free")
    }
}

/// The budget and what is granted of it; clones are the same ledger.
#[derive(Debug, Clone)]
pub struct Ledger(Arc<Mutex<Book>>);

#[derive(Debug, Default)]
struct Book {
    budget_bytes: u64,
    used_bytes: u64,
    peak_bytes: u64,
    lines: BTreeMap<(Line, Arc<str>), u64>,
    listeners: Listeners,
}

/// Who is told that bytes came to be free.
pub type Listener = dyn Fn() + Send + Sync;

#[derive(Clone, Default)]
struct Listeners(Vec<Weak<Listener>>);

impl fmt::Debug for Listeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} listeners", self.0.len())
    }
}

impl Listeners {
    fn tell(self) {
        self.0.iter().filter_map(Weak::upgrade).for_each(|listener| listener());
    }
}

/// Bytes of one line and owner in a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// What for.
    pub line: Line,
    /// Whose: a model's name, or empty for the process.
    pub owner: Arc<str>,
    /// How many.
    pub bytes: u64,
}

impl Ledger {
    /// An empty ledger over `budget_bytes`.
    pub fn new(budget_bytes: u64) -> Ledger {
        Ledger(Arc::new(Mutex::new(Book { budget_bytes, ..Book::default() })))
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // The numbers are changed together, after all that can fail: a panic elsewhere leaves them whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Grants `bytes`, or says how many are free.
    pub fn grant(&self, line: Line, owner: &str, bytes: u64) -> Result<Grant, Full> {
        let mut grant = Grant { ledger: self.clone(), line, owner: owner.into(), bytes: 0 };
        grant.resize(bytes)?;
        Ok(grant)
    }

    /// Records bytes that exist already and cannot be refused (the process itself), even beyond the budget.
    pub fn charge_unavoidable(&self, line: Line, owner: &str, bytes: u64) -> Grant {
        let grant = Grant { ledger: self.clone(), line, owner: owner.into(), bytes };
        self.book().add(line, &grant.owner, bytes);
        grant
    }

    /// All bytes that may be held.
    pub fn budget_bytes(&self) -> u64 {
        self.book().budget_bytes
    }

    /// Bytes granted now.
    pub fn used_bytes(&self) -> u64 {
        self.book().used_bytes
    }

    /// The most that was granted at once.
    pub fn peak_bytes(&self) -> u64 {
        self.book().peak_bytes
    }

    /// Bytes that can still be granted.
    pub fn free_bytes(&self) -> u64 {
        let book = self.book();
        book.budget_bytes.saturating_sub(book.used_bytes)
    }

    /// Bytes granted to `line`, whoever owns them.
    pub fn line_bytes(&self, line: Line) -> u64 {
        self.book().lines.iter().filter(|((l, _), _)| *l == line).map(|(_, bytes)| bytes).sum()
    }

    /// Everything that is granted, by line and owner.
    pub fn entries(&self) -> Vec<Entry> {
        let entry =
            |((line, owner), &bytes): (&(Line, Arc<str>), &u64)| Entry { line: *line, owner: owner.clone(), bytes };
        self.book().lines.iter().map(entry).collect()
    }

    /// Moves the budget towards `wanted_bytes`; only free bytes move, so the result may be more. Gives the new budget.
    pub fn resize(&self, wanted_bytes: u64) -> u64 {
        let mut book = self.book();
        let before = book.budget_bytes;
        book.budget_bytes = wanted_bytes.max(book.used_bytes);
        let now = book.budget_bytes;
        if now > before {
            let listeners = book.listeners.clone();
            drop(book);
            listeners.tell();
        }
        now
    }

    /// From now on `listener` is called, on whatever thread, after bytes came to be free; until it is dropped.
    pub fn on_free(&self, listener: &Arc<Listener>) {
        let listeners = &mut self.book().listeners.0;
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(Arc::downgrade(listener));
    }

    /// Takes bytes back, and tells.
    fn free(&self, line: Line, owner: &Arc<str>, bytes: u64) {
        let mut book = self.book();
        book.remove(line, owner, bytes);
        let listeners = book.listeners.clone();
        drop(book);
        if bytes > 0 {
            listeners.tell();
        }
    }
}

impl Book {
    fn add(&mut self, line: Line, owner: &Arc<str>, bytes: u64) {
        if bytes > 0 {
            *self.lines.entry((line, owner.clone())).or_default() += bytes;
            self.used_bytes += bytes;
            self.peak_bytes = self.peak_bytes.max(self.used_bytes);
        }
    }

    fn remove(&mut self, line: Line, owner: &Arc<str>, bytes: u64) {
        let key = (line, owner.clone());
        if let Some(held) = self.lines.get_mut(&key) {
            *held -= bytes;
            self.used_bytes -= bytes;
            if *held == 0 {
                self.lines.remove(&key);
            }
        }
    }
}

/// A right to bytes; dropped, it gives them back.
#[derive(Debug)]
#[must_use]
pub struct Grant {
    ledger: Ledger,
    line: Line,
    owner: Arc<str>,
    bytes: u64,
}

impl Grant {
    /// Bytes granted.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes the grant `bytes` large. Growing may find the ledger full; then nothing changes.
    pub fn resize(&mut self, bytes: u64) -> Result<(), Full> {
        if bytes > self.bytes {
            let mut book = self.ledger.book();
            let wanted_bytes = bytes - self.bytes;
            let free_bytes = book.budget_bytes.saturating_sub(book.used_bytes);
            if wanted_bytes > free_bytes {
                return Err(Full { wanted_bytes, free_bytes, budget_bytes: book.budget_bytes });
            }
            book.add(self.line, &self.owner, wanted_bytes);
        } else {
            self.ledger.free(self.line, &self.owner, self.bytes - bytes);
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Moves `bytes`, or as many as there are, to another line of the same ledger: nobody else can take them meanwhile.
    pub fn give(&mut self, to: &mut Grant, bytes: u64) {
        debug_assert!(Arc::ptr_eq(&self.ledger.0, &to.ledger.0));
        let bytes = bytes.min(self.bytes);
        let mut book = self.ledger.book();
        book.remove(self.line, &self.owner, bytes);
        book.add(to.line, &to.owner, bytes);
        drop(book);
        self.bytes -= bytes;
        to.bytes += bytes;
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.ledger.free(self.line, &self.owner, self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fixtures::rng::Rng;

    #[test]
    fn a_grant_beyond_the_budget_is_refused_with_the_numbers_and_changes_nothing() {
        let ledger = Ledger::new(100);
        let mut weights = ledger.grant(Line::Weights, "a", 70).expect("it fits");
        let full = Full { wanted_bytes: 31, free_bytes: 30, budget_bytes: 100 };
        assert_eq!(ledger.grant(Line::Kv, "a", 31).err(), Some(full));
        assert_eq!(weights.resize(101), Err(full));
        assert_eq!((weights.bytes(), ledger.used_bytes(), ledger.free_bytes()), (70, 70, 30));
        let kv = ledger.grant(Line::Kv, "a", 30).expect("it fits exactly");
        assert_eq!(ledger.free_bytes(), 0);
        drop((weights, kv));
        assert_eq!((ledger.used_bytes(), ledger.peak_bytes(), ledger.entries()), (0, 100, vec![]));
    }

    #[test]
    fn the_sum_of_the_lines_is_what_the_grants_say_and_never_exceeds_the_budget() {
        let mut rng = Rng::new(1);
        let (mut refused, mut granted) = (0, 0);
        let ledger = Ledger::new(1000);
        let mut grants: Vec<Grant> = Vec::new();
        for _ in 0..20_000 {
            let bytes = rng.below(200);
            match rng.below(4) {
                0 => {
                    let line = Line::ALL[rng.below(Line::ALL.len() as u64) as usize];
                    match ledger.grant(line, ["a", "b"][rng.below(2) as usize], bytes) {
                        Ok(grant) => grants.push(grant),
                        Err(full) => assert!(full.free_bytes < bytes),
                    }
                }
                1 if !grants.is_empty() => {
                    let at = rng.below(grants.len() as u64) as usize;
                    if grants[at].resize(bytes).is_err() { refused += 1 } else { granted += 1 }
                }
                2 if !grants.is_empty() => drop(grants.swap_remove(rng.below(grants.len() as u64) as usize)),
                _ => assert!(ledger.resize(500 + 5 * bytes) >= ledger.used_bytes()),
            }
            let sum: u64 = grants.iter().map(Grant::bytes).sum();
            assert_eq!(ledger.used_bytes(), sum);
            assert_eq!(Line::ALL.iter().map(|&line| ledger.line_bytes(line)).sum::<u64>(), sum);
            assert!(sum <= ledger.budget_bytes());
        }
        assert!(refused > 100 && granted > 100, "{refused} refused, {granted} granted");
        grants.clear();
        assert_eq!(ledger.used_bytes(), 0);
    }

    #[test]
    fn bytes_change_their_line_in_a_full_ledger() {
        let ledger = Ledger::new(100);
        let mut kv = ledger.grant(Line::Kv, "a", 100).expect("it fits");
        let mut prefix = ledger.grant(Line::PrefixCache, "a", 0).expect("nothing always fits");
        for (bytes, left) in [(30, 70), (90, 0)] {
            kv.give(&mut prefix, bytes);
            assert_eq!((kv.bytes(), prefix.bytes(), ledger.used_bytes()), (left, 100 - left, 100));
            assert_eq!(ledger.line_bytes(Line::PrefixCache), 100 - left);
        }
        drop((kv, prefix));
        assert_eq!((ledger.used_bytes(), ledger.peak_bytes()), (0, 100));
    }

    #[test]
    fn who_listens_is_told_of_bytes_that_come_to_be_free_and_of_nothing_else() {
        let ledger = Ledger::new(100);
        let told = Arc::new(Mutex::new(0));
        let counts = Arc::clone(&told);
        let listener: Arc<Listener> = Arc::new(move || *counts.lock().unwrap() += 1);
        ledger.on_free(&listener);
        let times = || *told.lock().unwrap();
        let mut kv = ledger.grant(Line::Kv, "a", 60).expect("it fits");
        assert!(ledger.grant(Line::Kv, "b", 60).is_err());
        assert_eq!((ledger.resize(80), times()), (80, 0));
        kv.resize(50).expect("less");
        assert_eq!((ledger.resize(90), times()), (90, 2));
        drop(kv);
        assert_eq!(times(), 3);
        drop(listener);
        drop(ledger.grant(Line::Kv, "a", 60).expect("it fits"));
        assert_eq!(times(), 3);
    }

    #[test]
    fn what_exists_already_is_charged_even_beyond_the_budget() {
        let ledger = Ledger::new(10);
        let base = ledger.charge_unavoidable(Line::Base, "", 12);
        assert_eq!((ledger.used_bytes(), ledger.free_bytes()), (12, 0));
        assert!(ledger.grant(Line::Io, "", 1).is_err());
        drop(base);
        assert_eq!(ledger.used_bytes(), 0);
    }
}
