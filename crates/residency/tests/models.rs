//! The model pool: what each rule promises, and that no order of events breaks any.

use std::collections::BTreeMap;

use fixtures::rng::Rng;
use residency::Error;
use residency::models::{Admission, Change, HOLD_LEASES, Lease, Models, Policy, Reason, State, Ticket};

const POLICY: Policy =
    Policy { capacity_bytes: 100, idle_bytes_max: 100, keep_alive_ms: Some(1000), thrash_ms: 100, waiting_max: 16 };

type Pool = Models<&'static str>;

/// Asks and is admitted to a model that must be loaded, which is then done.
fn load(pool: &mut Pool, model: &'static str, bytes: u64, now_ms: u64) -> Lease<&'static str> {
    let ticket = pool.ask(&model, bytes).unwrap();
    let Ok(Admission::Load(lease)) = pool.admit(ticket, now_ms) else { panic!("{model} does not load") };
    assert_eq!(pool.state(&model), Some(State::Reserved));
    pool.advance(&lease, State::Warming, now_ms);
    pool.advance(&lease, State::Resident, now_ms);
    lease
}

/// Loads and releases.
fn visit(pool: &mut Pool, model: &'static str, bytes: u64, now_ms: u64) {
    let lease = load(pool, model, bytes, now_ms);
    assert!(!pool.release(lease, now_ms));
}

fn evict(pool: &mut Pool, models: &[&'static str], now_ms: u64) {
    models.iter().for_each(|model| pool.evicted(model, now_ms));
}

fn reasons(pool: &Pool) -> Vec<(&'static str, Reason)> {
    let reason = |e: &residency::models::Event<&'static str>| match e.change {
        Change::State { reason: Some(reason), .. } => Some((e.model.unwrap(), reason)),
        _ => None,
    };
    pool.events().filter_map(reason).collect()
}

#[test]
fn the_least_recently_used_idle_model_makes_room() {
    let mut pool = Pool::new(POLICY);
    visit(&mut pool, "a", 40, 1);
    visit(&mut pool, "b", 40, 2);
    let ticket = pool.ask(&"a", 40).unwrap();
    let Ok(Admission::Use(lease)) = pool.admit(ticket, 3) else { panic!() };
    assert!(!pool.release(lease, 4));
    assert_eq!(pool.would_evict(60), Some(vec!["b"]));
    assert_eq!(pool.would_evict(61), Some(vec!["b", "a"]));
    assert_eq!(pool.would_evict(101), None);
    let ticket = pool.ask(&"c", 60).unwrap();
    assert_eq!(pool.admit(ticket, 5), Ok(Admission::Evict(vec!["b"])));
    assert_eq!(pool.admit(ticket, 5), Ok(Admission::Wait), "b is being freed: that is enough");
    evict(&mut pool, &["b"], 6);
    assert!(matches!(pool.admit(ticket, 7), Ok(Admission::Load(_))));
    assert_eq!(reasons(&pool), [("b", Reason::Replace)]);
}

#[test]
fn a_model_under_a_lease_stays_and_others_wait_in_order() {
    let mut pool = Pool::new(POLICY);
    let lease = load(&mut pool, "a", 60, 0);
    let b = pool.ask(&"b", 60).unwrap();
    let a = pool.ask(&"a", 60).unwrap();
    for _ in 0..3 {
        assert_eq!(pool.admit(b, 1), Ok(Admission::Wait));
        assert_eq!(pool.admit(a, 1), Ok(Admission::Wait), "a request of b came first");
    }
    assert!(!pool.release(lease, 2));
    assert_eq!(pool.admit(b, 3), Ok(Admission::Evict(vec!["a"])));
    assert_eq!(pool.admit(a, 3), Ok(Admission::Wait));
    evict(&mut pool, &["a"], 4);
    let Ok(Admission::Load(lease)) = pool.admit(b, 5) else { panic!() };
    pool.advance(&lease, State::Resident, 5);
    assert_eq!(pool.admit(a, 6), Ok(Admission::Wait));
    assert!(!pool.release(lease, 7));
    assert_eq!(pool.admit(a, 8), Ok(Admission::Evict(vec!["b"])));
}

#[test]
fn an_order_to_unload_waits_for_the_leases_and_new_requests_get_an_answer() {
    let mut pool = Pool::new(POLICY);
    let lease = load(&mut pool, "a", 60, 0);
    assert!(!pool.unload(&"a", 1));
    let ticket = pool.ask(&"a", 60).unwrap();
    assert_eq!(pool.admit(ticket, 2), Ok(Admission::Unloading));
    assert_eq!((pool.waiting(), pool.used_bytes()), (0, 60));
    pool.evicted(&"a", 2);
    assert_eq!(pool.state(&"a"), Some(State::Draining), "somebody uses it");
    assert!(pool.release(lease, 3));
    pool.evicted(&"a", 3);
    assert_eq!((pool.state(&"a"), pool.used_bytes()), (None, 0));
    visit(&mut pool, "a", 60, 4);
    assert!(pool.unload(&"a", 5), "nobody uses it");
}

#[test]
fn keep_alive_and_the_share_of_idle_models_end_stays_with_their_reasons() {
    let mut pool = Pool::new(Policy { idle_bytes_max: 50, ..POLICY });
    visit(&mut pool, "a", 30, 0);
    assert_eq!(pool.due_at_ms(), Some(1000));
    assert!(pool.due(999).is_empty());
    visit(&mut pool, "b", 30, 999);
    assert_eq!(pool.due(999), ["a"]);
    evict(&mut pool, &["a"], 999);
    assert!(pool.due(1998).is_empty());
    assert_eq!(pool.due(1999), ["b"]);
    assert_eq!(reasons(&pool), [("a", Reason::Idle), ("b", Reason::Ttl)]);
}

#[test]
fn protected_models_are_a_floor() {
    let mut pool = Pool::new(POLICY);
    visit(&mut pool, "a", 60, 0);
    pool.protect(&"a", true);
    assert_eq!(pool.ask(&"b", 41), Err(Error::TooLarge { bytes: 41, max_bytes: 40 }));
    assert_eq!(pool.resize(59, 1), Err(Error::BelowFloor { max_bytes: 59, floor_bytes: 60 }));
    assert!(pool.due(10_000).is_empty() && pool.drop_idle(10_000).is_empty());
    visit(&mut pool, "b", 40, 2);
    assert_eq!(pool.drop_idle(3), ["b"]);
    evict(&mut pool, &["b"], 3);
    pool.protect(&"a", false);
    assert_eq!(pool.drop_idle(4), ["a"]);
}

#[test]
fn a_request_that_became_too_large_while_it_waited_hears_so() {
    let mut pool = Pool::new(POLICY);
    let lease = load(&mut pool, "a", 60, 0);
    let ticket = pool.ask(&"b", 60).unwrap();
    assert_eq!(pool.admit(ticket, 1), Ok(Admission::Wait));
    pool.protect(&"a", true);
    assert_eq!(pool.admit(ticket, 2), Err(Error::TooLarge { bytes: 60, max_bytes: 40 }));
    assert_eq!(pool.waiting(), 0);
    assert!(!pool.release(lease, 3));
}

#[test]
fn the_capacity_shrinks_as_bytes_become_free_and_no_faster() {
    let mut pool = Pool::new(POLICY);
    visit(&mut pool, "a", 30, 0);
    let lease = load(&mut pool, "b", 60, 1);
    assert_eq!(pool.resize(40, 2), Ok(vec!["a"]));
    assert_eq!(pool.capacity_bytes(), 90);
    evict(&mut pool, &["a"], 3);
    assert_eq!(pool.capacity_bytes(), 60, "b is in use");
    assert!(!pool.release(lease, 4));
    assert_eq!(pool.resize(40, 5), Ok(vec!["b"]));
    evict(&mut pool, &["b"], 6);
    assert_eq!(pool.capacity_bytes(), 40);
    let resized = |e: &&residency::models::Event<_>| matches!(e.change, Change::Resized { to_bytes: 90, .. });
    assert_eq!(pool.events().filter(resized).count(), 1, "partial fulfilment is in the log");
    assert_eq!(pool.resize(200, 7), Ok(vec![]));
    assert_eq!(pool.capacity_bytes(), 200);
}

#[test]
fn a_pool_that_thrashes_serves_who_waits_before_it_replaces() {
    let mut pool = Pool::new(POLICY);
    visit(&mut pool, "a", 60, 0);
    let b = pool.ask(&"b", 60).unwrap();
    assert_eq!(pool.admit(b, 1), Ok(Admission::Evict(vec!["a"])));
    evict(&mut pool, &["a"], 1);
    let Ok(Admission::Load(lease)) = pool.admit(b, 1) else { panic!() };
    pool.advance(&lease, State::Resident, 1);
    assert!(!pool.release(lease, 1));
    // a comes back at once, b waits, and many more want a.
    let a = pool.ask(&"a", 60).unwrap();
    assert_eq!(pool.admit(a, 2), Ok(Admission::Evict(vec!["b"])));
    evict(&mut pool, &["b"], 2);
    let Ok(Admission::Load(lease)) = pool.admit(a, 2) else { panic!() };
    pool.advance(&lease, State::Resident, 2);
    let b = pool.ask(&"b", 60).unwrap();
    let more: Vec<Ticket> = (0..12).map(|_| pool.ask(&"a", 60).unwrap()).collect();
    assert!(!pool.release(lease, 3));
    assert_eq!(pool.admit(b, 3), Ok(Admission::Wait));
    let mut served = 1;
    for &ticket in &more {
        match pool.admit(ticket, 4).unwrap() {
            Admission::Use(lease) => {
                served += 1;
                assert!(!pool.release(lease, 4));
            }
            Admission::Wait => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(served, HOLD_LEASES);
    assert!(pool.events().any(|e| e.change == Change::Held));
    assert_eq!(pool.admit(b, 5), Ok(Admission::Evict(vec!["a"])), "nobody is held off for ever");
}

#[test]
fn a_load_that_fails_gives_its_capacity_back_and_ends_its_leases() {
    let mut pool = Pool::new(POLICY);
    let ticket = pool.ask(&"a", 60).unwrap();
    let Ok(Admission::Load(loader)) = pool.admit(ticket, 0) else { panic!() };
    let ticket = pool.ask(&"a", 60).unwrap();
    let Ok(Admission::Use(other)) = pool.admit(ticket, 0) else { panic!() };
    pool.failed(loader, 1);
    assert_eq!((pool.used_bytes(), pool.state_under(&other)), (0, None));
    let again = load(&mut pool, "a", 60, 2);
    assert!(!pool.release(other, 3), "a lease on a stay that is over ends nothing");
    assert_eq!(pool.leases(&"a"), 1);
    assert!(!pool.release(again, 4));
}

#[test]
fn the_queue_has_an_end() {
    let mut pool = Pool::new(Policy { waiting_max: 2, ..POLICY });
    let first = pool.ask(&"a", 1).unwrap();
    pool.ask(&"b", 1).unwrap();
    assert_eq!(pool.ask(&"c", 1), Err(Error::QueueFull { waiting: 2, max: 2 }));
    pool.cancel(first);
    assert!(pool.ask(&"c", 1).is_ok());
}

/// The simplest pool that could be right: what is held, and who holds it.
#[derive(Default)]
struct Naive {
    /// Bytes of each model whose memory exists.
    memory: BTreeMap<usize, u64>,
    leases: Vec<Lease<usize>>,
}

#[test]
fn no_order_of_events_evicts_a_leased_model_exceeds_the_capacity_or_starves_a_request() {
    let (mut evictions, mut loads, mut waits) = (0, 0, 0);
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let mut pool: Models<usize> = Models::new(Policy { thrash_ms: 20, keep_alive_ms: Some(50), ..POLICY });
        let mut naive = Naive::default();
        let mut tickets: Vec<(Ticket, usize)> = Vec::new();
        let bytes_of = |model: usize| 20 + 15 * model as u64;
        let mut free = |pool: &mut Models<usize>, naive: &mut Naive, models: Vec<usize>, now_ms| {
            for model in models {
                assert!(naive.leases.iter().all(|l| l.model != model || pool.state_under(l).is_none()), "in use");
                assert!(naive.memory.remove(&model).is_some());
                pool.evicted(&model, now_ms);
                evictions += 1;
            }
        };
        for now_ms in 0..400 {
            match rng.below(10) {
                0..3 => {
                    let model = rng.below(5) as usize;
                    if let Ok(ticket) = pool.ask(&model, bytes_of(model)) {
                        tickets.push((ticket, model));
                    }
                }
                3..6 if !tickets.is_empty() => {
                    let at = rng.below(tickets.len() as u64) as usize;
                    let (ticket, model) = tickets[at];
                    match pool.admit(ticket, now_ms).unwrap() {
                        Admission::Use(lease) => {
                            tickets.remove(at);
                            naive.leases.push(lease);
                        }
                        Admission::Load(lease) => {
                            tickets.remove(at);
                            loads += 1;
                            if rng.below(8) == 0 {
                                pool.failed(lease, now_ms);
                            } else {
                                assert!(naive.memory.insert(model, bytes_of(model)).is_none(), "one copy");
                                pool.advance(&lease, State::Resident, now_ms);
                                naive.leases.push(lease);
                            }
                        }
                        Admission::Evict(models) => free(&mut pool, &mut naive, models, now_ms),
                        Admission::Wait => waits += 1,
                        Admission::Unloading => drop(tickets.remove(at)),
                    }
                }
                6..8 if !naive.leases.is_empty() => {
                    let lease = naive.leases.swap_remove(rng.below(naive.leases.len() as u64) as usize);
                    let model = lease.model;
                    if pool.release(lease, now_ms) {
                        free(&mut pool, &mut naive, vec![model], now_ms);
                    }
                }
                8 => {
                    let models = match rng.below(4) {
                        0 => pool.drop_idle(now_ms),
                        1 => pool.resize(80 + rng.below(80), now_ms).unwrap(),
                        _ => pool.due(now_ms),
                    };
                    free(&mut pool, &mut naive, models, now_ms);
                }
                9 if rng.below(4) == 0 => {
                    let model = rng.below(5) as usize;
                    if pool.unload(&model, now_ms) {
                        free(&mut pool, &mut naive, vec![model], now_ms);
                    }
                }
                _ => {}
            }
            let held: u64 = naive.memory.values().sum();
            assert!(held <= pool.capacity_bytes());
            assert_eq!(pool.used_bytes(), held);
        }
        // Everybody who still waits is served once the others have gone.
        for lease in std::mem::take(&mut naive.leases) {
            let model = lease.model;
            if pool.release(lease, 400) {
                free(&mut pool, &mut naive, vec![model], 400);
            }
        }
        let surplus = pool.resize(100, 400).unwrap();
        free(&mut pool, &mut naive, surplus, 400);
        let mut rounds = 0;
        while !tickets.is_empty() {
            rounds += 1;
            assert!(rounds < 1000, "starved: {tickets:?}");
            tickets.retain(|&(ticket, model)| {
                let lease = match pool.admit(ticket, 401).unwrap() {
                    Admission::Evict(models) => {
                        free(&mut pool, &mut naive, models, 401);
                        return true;
                    }
                    Admission::Wait => return true,
                    Admission::Unloading => panic!("nobody ordered that"),
                    Admission::Load(lease) => {
                        naive.memory.insert(model, bytes_of(model));
                        pool.advance(&lease, State::Resident, 401);
                        lease
                    }
                    Admission::Use(lease) => lease,
                };
                assert!(!pool.release(lease, 401));
                false
            });
        }
        let last = pool.drop_idle(402);
        free(&mut pool, &mut naive, last, 402);
        assert_eq!((pool.used_bytes(), pool.waiting()), (0, 0));
    }
    assert!(evictions > 1000 && loads > 1000 && waits > 1000, "{evictions} {loads} {waits}");
}
