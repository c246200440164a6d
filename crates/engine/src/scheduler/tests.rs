//! Arrival traces without a model: memory is a number of blocks, a step is a step.

use std::collections::BTreeMap;

use fixtures::rng::Rng;
use residency::kv::{Growth, Shortage};

use super::*;
use crate::limits::{GUARDED_STEPS, LIGHT_ROWS, RIDE_ROWS};

const BLOCK: usize = 16;
const CHUNK: usize = 64;

/// A request of a trace.
#[derive(Debug, Clone, Copy)]
struct Arrival {
    step: usize,
    class: Class,
    prompt: usize,
    generate: usize,
}

fn arrival(step: usize, class: Class, prompt: usize, generate: usize) -> Arrival {
    Arrival { step, class, prompt, generate }
}

/// What a request has.
#[derive(Debug, Clone)]
struct Job {
    class: Class,
    prompt: usize,
    len: usize,
    end: usize,
    computed: usize,
    blocks: usize,
    admissions: usize,
    /// Steps that gave it a token.
    tokens: Vec<usize>,
    first_rows: Option<usize>,
}

impl Job {
    fn pending(&self) -> usize {
        self.len - self.computed
    }
}

/// A machine that has `blocks` blocks and keeps nothing of what is released.
struct Machine {
    scheduler: Scheduler,
    books: Books,
    done: BTreeMap<RequestId, Job>,
    step: usize,
    /// Shares of each step.
    log: Vec<Vec<Share>>,
}

struct Books {
    blocks: usize,
    jobs: BTreeMap<RequestId, Job>,
    refused: Vec<(RequestId, Shortage)>,
}

impl Books {
    fn free(&self) -> usize {
        self.blocks - self.jobs.values().map(|j| j.blocks).sum::<usize>()
    }

    fn shortage(&self, wanted: usize) -> Shortage {
        let free_bytes = self.free() as u64;
        let limit_bytes = self.blocks as u64;
        let leased_bytes = limit_bytes - free_bytes;
        Shortage { wanted_bytes: wanted as u64, leased_bytes, cached_bytes: 0, limit_bytes }
    }
}

impl Memory for Books {
    fn admit(&mut self, id: RequestId) -> Admission {
        let job = &self.jobs[&id];
        let wanted = (job.len + 1).div_ceil(BLOCK);
        if wanted > self.blocks {
            return Admission::Refuse(self.shortage(wanted));
        }
        if wanted > self.free() {
            return Admission::Wait(self.shortage(wanted));
        }
        let job = self.jobs.get_mut(&id).unwrap();
        assert_eq!((job.blocks, job.computed), (0, 0), "it holds nothing yet");
        job.blocks = wanted;
        job.admissions += 1;
        Admission::Run(job.pending())
    }

    fn grow(&mut self, shares: &[Share]) -> Growth {
        let wanted = |s: &Share| {
            let job = &self.jobs[&s.id];
            (job.computed + s.rows + s.drafts).div_ceil(BLOCK).saturating_sub(job.blocks)
        };
        let all: usize = shares.iter().map(wanted).sum();
        if all > self.free() {
            return Growth::Wait(self.shortage(all));
        }
        for share in shares {
            let job = self.jobs.get_mut(&share.id).unwrap();
            job.blocks = job.blocks.max((job.computed + share.rows + share.drafts).div_ceil(BLOCK));
        }
        Growth::Ready
    }

    fn release(&mut self, id: RequestId) {
        let job = self.jobs.get_mut(&id).unwrap();
        (job.blocks, job.computed) = (0, 0);
    }

    fn refuse(&mut self, id: RequestId, shortage: Shortage) {
        self.jobs.remove(&id);
        self.refused.push((id, shortage));
    }
}

impl Machine {
    fn new(blocks: usize, running_max: usize) -> Machine {
        let limits = Limits { chunk_rows: CHUNK, running_max, waiting_max: 1000 };
        let books = Books { blocks, jobs: BTreeMap::new(), refused: Vec::new() };
        Machine { scheduler: Scheduler::new(limits), books, done: BTreeMap::new(), step: 0, log: Vec::new() }
    }

    fn submit(&mut self, arrival: Arrival) -> RequestId {
        let Submission::Queued(id) = self.scheduler.submit(arrival.class) else { panic!("a place for a thousand") };
        let job = Job {
            class: arrival.class,
            prompt: arrival.prompt,
            len: arrival.prompt,
            end: arrival.prompt + arrival.generate,
            computed: 0,
            blocks: 0,
            admissions: 0,
            tokens: Vec::new(),
            first_rows: None,
        };
        self.books.jobs.insert(id, job);
        id
    }

    fn step(&mut self) {
        self.scheduler.admit(&mut self.books);
        let shares = self.scheduler.schedule(|_, _| 0);
        let shares = self.scheduler.grow(shares, &mut self.books);
        self.check(&shares);
        for share in &shares {
            let job = self.books.jobs.get_mut(&share.id).expect("who is refused has no share");
            job.first_rows.get_or_insert(self.step);
            job.computed += share.rows;
            assert!(job.computed <= job.blocks * BLOCK, "no row without room");
            if job.pending() == 0 {
                job.len += 1;
                job.tokens.push(self.step);
            }
            self.scheduler.set_pending(share.id, job.pending());
            if job.len == job.end {
                let job = self.books.jobs.remove(&share.id).unwrap();
                self.scheduler.remove(share.id);
                self.done.insert(share.id, job);
            }
        }
        self.log.push(shares);
        self.step += 1;
    }

    /// What holds in every step.
    fn check(&self, shares: &[Share]) {
        let jobs = &self.books.jobs;
        let decodes = |id: &RequestId| jobs[id].blocks > 0 && jobs[id].pending() == 1;
        let interactive: Vec<_> =
            jobs.keys().filter(|id| decodes(id) && jobs[id].class == Class::Interactive).collect();
        let lower = |s: &&Share| jobs[&s.id].class < Class::Interactive;
        let lower_rows: usize = shares.iter().filter(lower).map(|s| s.rows).sum();
        let prompt_rows: usize = shares.iter().filter(|s| !decodes(&s.id)).map(|s| s.rows).sum();
        let rows: usize = shares.iter().map(|s| s.rows).sum();
        assert!(prompt_rows <= 1 || rows <= CHUNK, "one chunk with prompts: {shares:?}");
        assert!(interactive.is_empty() || lower_rows <= CHUNK, "one chunk of lower classes: {shares:?}");
        let running = self.scheduler.entries.iter().filter(|e| e.state == State::Running).count();
        assert!(running <= self.scheduler.limits.running_max);
        let mut ids: Vec<_> = shares.iter().map(|s| s.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), shares.len(), "a share each");
        assert!(!shares.is_empty() || jobs.is_empty() || running == 0, "there was something to do");
    }

    /// Plays `trace` to its end; the ids of its requests.
    fn play(&mut self, trace: &[Arrival]) -> Vec<RequestId> {
        let mut ids = Vec::new();
        while ids.len() < trace.len() || !self.scheduler.is_idle() {
            while let Some(&next) = trace.get(ids.len()).filter(|a| a.step <= self.step) {
                ids.push(self.submit(next));
            }
            self.step();
            assert!(self.step < 200_000, "it ends");
        }
        ids
    }
}

#[test]
fn a_prompt_is_cut_into_chunks_and_decoding_goes_on_beside_it() {
    let mut machine = Machine::new(100, 8);
    let ids = machine.play(&[arrival(0, Class::System, 10, 50), arrival(3, Class::System, 3 * (CHUNK - 1), 5)]);
    let tokens = &machine.done[&ids[0]].tokens;
    assert_eq!(*tokens, (0..50).collect::<Vec<_>>(), "a token in every step");
    assert_eq!(machine.done[&ids[1]].tokens, [5, 6, 7, 8, 9], "three chunks, the third with a token");
}

#[test]
fn an_interactive_decode_is_disturbed_by_one_chunk_in_twenty_five_steps_and_the_background_gets_done() {
    let mut machine = Machine::new(1000, 8);
    let prompt = 125 * CHUNK;
    let ids = machine.play(&[arrival(0, Class::Background, prompt, 4), arrival(5, Class::Interactive, 20, 2000)]);
    let talk = &machine.done[&ids[1]];
    let steps = talk.tokens.last().unwrap() - talk.tokens[0];
    assert_eq!(steps + 1, 2000, "a token in every step");
    let disturbed: Vec<usize> = (talk.tokens[0] + 1..=*talk.tokens.last().unwrap())
        .filter(|&step| machine.log[step].iter().any(|s| s.id == ids[0] && s.rows > 1))
        .collect();
    assert!(disturbed.windows(2).all(|w| w[1] - w[0] == GUARDED_STEPS + 1), "{disturbed:?}");
    assert!(disturbed.len() * 20 < steps && disturbed.len() >= steps / (GUARDED_STEPS + 1), "{disturbed:?}");
    let job = &machine.done[&ids[0]];
    assert_eq!(job.tokens.len(), 4);
    // Before, beside and after the conversation, a chunk whenever it was its turn.
    let chunks: usize = machine.log.iter().flatten().filter(|s| s.id == ids[0] && s.rows > 1).count();
    assert!((126..130).contains(&chunks), "{chunks}: they hold the conversation's tokens too");
}

#[test]
fn lower_classes_that_decode_ride_along_in_turn() {
    let mut machine = Machine::new(1000, 64);
    let mut trace = vec![arrival(0, Class::Interactive, 5, 300)];
    trace.extend((0..9).map(|_| arrival(0, Class::Batch, 2, 40)));
    let ids = machine.play(&trace);
    let beside: Vec<&Vec<Share>> =
        machine.log.iter().filter(|s| s.iter().any(|s| s.id == ids[0]) && s.len() > 1).collect();
    let light = beside.iter().filter(|s| s.len() <= RIDE_ROWS).count();
    assert!(light * 20 >= beside.len() * 19, "{light} of {} steps", beside.len());
    let batch: Vec<&Job> = ids[1..].iter().map(|id| &machine.done[id]).collect();
    let (first, last) = (
        batch.iter().map(|j| *j.tokens.last().unwrap()).min().unwrap(),
        batch.iter().map(|j| *j.tokens.last().unwrap()).max().unwrap(),
    );
    assert!(last < 290 && last - first < 30, "they end together: {first} {last}");
}

#[test]
fn the_higher_class_goes_first_and_in_a_class_the_one_that_came_first() {
    let mut machine = Machine::new(1000, 1);
    let classes = [Class::Batch, Class::Background, Class::System, Class::Interactive, Class::Interactive];
    let trace: Vec<Arrival> = classes.iter().map(|&class| arrival(0, class, 10, 3)).collect();
    let ids = machine.play(&trace);
    let first = |i: usize| machine.done[&ids[i]].tokens[0];
    assert!(first(3) < first(4) && first(4) < first(2) && first(2) < first(1) && first(1) < first(0));
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one_and_the_long_one_gets_done() {
    let mut machine = Machine::new(1000, 64);
    let mut trace = vec![arrival(0, Class::Interactive, 100 * CHUNK, 1)];
    trace.extend((0..300).map(|i| arrival(1 + i, Class::Interactive, CHUNK, 1)));
    let ids = machine.play(&trace);
    assert!(machine.done[&ids[1]].tokens[0] <= 4, "{:?}", machine.done[&ids[1]].tokens);
    // Every other step is the oldest one's.
    assert!(machine.done[&ids[0]].tokens[0] <= 210, "{:?}", machine.done[&ids[0]].tokens);
}

#[test]
fn who_never_fits_is_refused_with_the_numbers_and_the_others_go_on() {
    let mut machine = Machine::new(10, 8);
    let ids = machine.play(&[arrival(0, Class::Batch, 20, 5), arrival(0, Class::Interactive, 10 * BLOCK, 5)]);
    assert_eq!(machine.books.refused.len(), 1);
    let (id, shortage) = machine.books.refused[0];
    assert_eq!((id, shortage.wanted_bytes, shortage.limit_bytes), (ids[1], 11, 10));
    assert_eq!(machine.done[&ids[0]].tokens.len(), 5);
}

#[test]
fn an_answer_that_outgrows_the_memory_is_refused_once_nobody_is_left_to_give_way() {
    let mut machine = Machine::new(4, 8);
    let ids = machine.play(&[arrival(0, Class::System, 20, 1000), arrival(0, Class::System, 20, 10)]);
    assert_eq!(machine.books.refused.iter().map(|r| r.0).collect::<Vec<_>>(), [ids[0]]);
    assert_eq!(machine.done[&ids[1]].tokens.len(), 10);
}

#[test]
fn a_full_machine_takes_memory_from_the_lowest_class_and_gives_it_back() {
    let mut machine = Machine::new(12, 8);
    let trace = [
        arrival(0, Class::System, 4 * BLOCK, 40),
        arrival(0, Class::Batch, 5 * BLOCK, 40),
        arrival(10, Class::Interactive, 4 * BLOCK, 20),
    ];
    let ids = machine.play(&trace);
    let [system, batch, talk] = [0, 1, 2].map(|i| &machine.done[&ids[i]]);
    assert_eq!((system.admissions, talk.admissions), (1, 1));
    assert!(batch.admissions > 1, "it gave way");
    assert_eq!(talk.first_rows, Some(10), "at once");
    assert_eq!(batch.tokens.len(), 40, "and it got done");
}

#[test]
fn a_higher_class_gets_a_place_at_once_and_who_made_it_keeps_what_was_computed() {
    let mut machine = Machine::new(1000, 2);
    let trace =
        [arrival(0, Class::Batch, 10, 30), arrival(0, Class::Batch, 10, 30), arrival(5, Class::Interactive, 10, 10)];
    let ids = machine.play(&trace);
    assert_eq!(machine.done[&ids[2]].tokens[0], 5);
    assert!(ids.iter().all(|id| machine.done[id].admissions == 1), "nothing was computed twice");
    let paused = &machine.done[&ids[1]].tokens;
    assert!(paused.windows(2).any(|w| w[1] - w[0] > 10), "the last one made place: {paused:?}");
    assert!(machine.done[&ids[0]].tokens.windows(2).all(|w| w[1] - w[0] <= 2), "the first one did not");
}

#[test]
fn what_is_removed_is_free_in_the_same_step() {
    let mut machine = Machine::new(5, 8);
    let first = machine.submit(arrival(0, Class::Interactive, 4 * BLOCK, 100));
    machine.step();
    let second = machine.submit(arrival(0, Class::Interactive, 4 * BLOCK, 1));
    machine.step();
    assert_eq!(machine.books.jobs[&second].admissions, 0, "it waits");
    machine.scheduler.remove(first);
    machine.books.jobs.remove(&first);
    machine.step();
    assert_eq!(machine.done[&second].admissions, 1);
}

#[test]
fn the_queue_has_a_bound_that_is_a_value() {
    let mut scheduler = Scheduler::new(Limits { chunk_rows: 1, running_max: 1, waiting_max: 2 });
    assert!(matches!(scheduler.submit(Class::Batch), Submission::Queued(_)));
    assert!(matches!(scheduler.submit(Class::Batch), Submission::Queued(_)));
    assert_eq!(scheduler.submit(Class::Interactive), Submission::Full { waiting: 2, waiting_max: 2 });
}

#[test]
fn guesses_fill_a_light_step_and_no_more() {
    let mut machine = Machine::new(1000, 64);
    let ids: Vec<_> = (0..3).map(|_| machine.submit(arrival(0, Class::Interactive, 5, 100))).collect();
    machine.step();
    let shares = machine.scheduler.schedule(|id, _| if id == ids[1] { 4 } else { 3 });
    assert_eq!(shares.iter().map(|s| s.drafts).collect::<Vec<_>>(), [3, 2, 0]);
    assert_eq!(shares.iter().map(|s| s.rows + s.drafts).sum::<usize>(), LIGHT_ROWS);
    machine.submit(arrival(0, Class::Interactive, 500, 1));
    machine.scheduler.admit(&mut machine.books);
    let beside_a_prompt = machine.scheduler.schedule(|_, _| 7);
    assert!(beside_a_prompt.iter().all(|s| s.drafts == 0) && beside_a_prompt.len() == 4);
}

#[test]
fn random_traces_end_with_every_answer_whole_and_the_same_each_time() {
    let (mut preempted, mut refused) = (0, 0);
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let blocks = 20 + rng.below(60) as usize;
        let running_max = 1 + rng.below(12) as usize;
        let mut step = 0;
        let trace: Vec<Arrival> = (0..40)
            .map(|_| {
                step += rng.below(12) as usize;
                let class = Class::ALL[rng.below(4) as usize];
                arrival(step, class, 1 + rng.below(500) as usize, 1 + rng.below(60) as usize)
            })
            .collect();
        let mut machine = Machine::new(blocks, running_max);
        let ids = machine.play(&trace);
        let refused_ids: Vec<RequestId> = machine.books.refused.iter().map(|r| r.0).collect();
        for (id, arrival) in ids.iter().zip(&trace) {
            match machine.done.get(id) {
                Some(job) => {
                    assert_eq!((job.tokens.len(), job.prompt), (arrival.generate, arrival.prompt));
                    preempted += job.admissions - 1;
                }
                None => {
                    let most = arrival.prompt + arrival.generate;
                    assert!(refused_ids.contains(id) && most.div_ceil(BLOCK) > blocks, "seed {seed}: {arrival:?}");
                    refused += 1;
                }
            }
        }
        let mut again = Machine::new(blocks, running_max);
        again.play(&trace);
        assert_eq!(again.log, machine.log, "seed {seed}");
    }
    assert!(preempted > 20 && refused > 20, "{preempted} preempted, {refused} refused");
}

#[test]
fn nobody_starves_in_a_class_whatever_comes_after() {
    let mut machine = Machine::new(30, 4);
    let mut trace = vec![arrival(0, Class::Batch, 300, 30)];
    // More than the machine can do: the queue grows all the time.
    trace.extend((1..200).map(|i| arrival(i, Class::Batch, 60, 20)));
    let ids = machine.play(&trace);
    let ends: Vec<usize> = ids.iter().map(|id| *machine.done[id].tokens.last().unwrap()).collect();
    assert!(ends[0] < 60, "{}", ends[0]);
    // In the order of arrival, but for those that run together.
    assert!((0..ends.len() - 8).all(|i| ends[i] < ends[i + 8]), "{ends:?}");
}
