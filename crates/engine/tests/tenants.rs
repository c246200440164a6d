//! Keys and values that are kept: used again by their own tenant, never by another, and given up under pressure.

mod common;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};

use common::{alone, drawn, engine, finish, greedy, step, submit, tiny, tokens};
use engine::{Class, Engine, Error, Request, RequestId};
use fixtures::rng::Rng;
use fixtures::tiny_model::Architecture;
use model::{Opening, Row};

/// The logits behind `history`, as bits, computed upon what the engine has kept of it; and how many tokens that were.
/// `None` if there is no room now.
fn logits_upon_kept(engine: &mut Engine, history: &[u32], salt: &[u8]) -> Option<(Vec<u32>, usize)> {
    let opening = Opening { tokens: history, context_max: history.len(), class: Class::Batch, salt };
    let runner = engine.runner();
    let opened = runner.sequence_join(&opening).unwrap();
    let rest = &history[opened.reused..];
    let row = |(i, &token): (usize, &u32)| Row { sequence: opened.id, token, logits: i + 1 == rest.len() };
    let rows: Vec<Row> = rest.iter().enumerate().map(row).collect();
    let logits = runner.forward(&rows).map(|logits| logits.iter().map(|x| x.to_bits()).collect());
    runner.sequence_close(opened.id);
    logits.ok().map(|logits| (logits, opened.reused))
}

fn logits_alone(model: &std::sync::Arc<model::Model>, history: &[u32]) -> Vec<u32> {
    let mut engine = engine(model, 64);
    logits_upon_kept(&mut engine, history, b"alone").unwrap().0
}

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

struct Sent {
    tenant: usize,
    request: Request,
    /// The longest beginning that the same tenant had asked about or been answered with before.
    own_prefix: usize,
}

#[test]
fn a_thousand_interleaved_sessions_of_many_tenants_never_see_each_other() {
    const SESSIONS: usize = 1000;
    const TENANTS: u64 = 40;
    let model = tiny(Architecture::Llama);
    let mut rng = Rng::new(7);
    let mut engine = engine(&model, 32);
    engine.set_limits(12, 64);
    // Room for about ten sessions of a hundred tokens.
    let limit = engine.runner().kv_bytes_per_token() * 1000;
    engine.runner().set_kv_limit(Some(limit));
    // What all tenants begin with, and what each alone knows.
    let public = tokens(&mut rng, 40);
    let secrets: Vec<Vec<u32>> = (0..TENANTS).map(|_| tokens(&mut rng, 24)).collect();
    let salt = |tenant: usize| format!("tenant {tenant}").into_bytes();

    let mut histories: Vec<Vec<Vec<u32>>> = vec![Vec::new(); TENANTS as usize];
    let mut sent: HashMap<RequestId, Sent> = HashMap::new();
    let (mut count, mut checked, mut reused, mut cancelled) = (0, 0, 0, 0);
    while count < SESSIONS || !engine.is_idle() {
        while count < SESSIONS && engine.load().1 < 16 {
            let tenant = rng.below(TENANTS) as usize;
            // Some ask with another's secret: a guess that must not be told from any other by what it costs.
            let known = if rng.below(4) == 0 { rng.below(TENANTS) as usize } else { tenant };
            let mut prompt = [&public[..], &secrets[known]].concat();
            prompt.truncate(1 + rng.below(64) as usize);
            let own = rng.below(12) as usize;
            prompt.extend(tokens(&mut rng, own));
            let own_prefix = histories[tenant].iter().map(|h| common_prefix(h, &prompt)).max().unwrap_or(0);
            let class = Class::ALL[rng.below(4) as usize];
            let request =
                Request { class, salt: salt(tenant), ..drawn(&prompt, 1 + rng.below(8) as usize, count as u64) };
            histories[tenant].push(prompt);
            sent.insert(submit(&mut engine, request.clone()), Sent { tenant, request, own_prefix });
            count += 1;
        }
        step(&mut engine);
        assert!(engine.runner().kv_bytes() <= limit);
        if rng.below(40) == 0
            && let Some(&id) = sent.keys().min()
        {
            engine.cancel(id);
            cancelled += 1;
        }
        for ended in engine.take_ended() {
            let Sent { tenant, request, own_prefix } = sent.remove(&ended.id).unwrap();
            let answer = ended.result.unwrap();
            // What others of the same tenant asked while it waited counts too.
            let own_prefix = histories[tenant]
                .iter()
                .filter(|h| **h != request.prompt)
                .map(|h| common_prefix(h, &request.prompt))
                .max()
                .unwrap_or(0)
                .max(own_prefix);
            assert!(answer.reused <= own_prefix, "{} tokens of another tenant", answer.reused - own_prefix);
            reused += answer.reused;
            let expected = alone(&model, Request { class: Class::Batch, ..request.clone() });
            assert_eq!(answer.tokens, expected.tokens[..answer.tokens.len()]);
            let history = [&request.prompt[..], &answer.tokens].concat();
            if checked % 8 == 0
                && let Some((logits, _)) = logits_upon_kept(&mut engine, &history, &request.salt)
            {
                assert!(logits == logits_alone(&model, &history), "bits of a session of tenant {tenant}");
            }
            checked += 1;
            histories[tenant].push(history);
        }
    }
    let evicted: u64 = engine.runner().kv_stats().evicted_blocks.iter().sum();
    assert_eq!(checked, SESSIONS);
    assert!(reused > 5000 && evicted > 500 && cancelled > 5, "{reused} reused, {evicted} evicted, {cancelled}");
}

#[test]
fn the_first_request_of_a_tenant_finds_nothing_of_what_others_have_computed() {
    let model = tiny(Architecture::Gemma3);
    let mut engine = engine(&model, 64);
    let prompt = tokens(&mut Rng::new(1), 100);
    let mut reused = |salt: &str| {
        let id = submit(&mut engine, Request { salt: salt.into(), ..greedy(&prompt, 4) });
        finish(&mut engine).remove(&id).unwrap().unwrap().reused
    };
    assert_eq!([reused("a"), reused("b"), reused(""), reused("a")], [0, 0, 0, 99]);
}

/// Two agents that take turns with conversations of `len` tokens.
fn alternate(engine: &mut Engine, len: usize, turns: usize) -> BTreeMap<usize, Vec<usize>> {
    let mut rng = Rng::new(11);
    let mut histories = [tokens(&mut rng, len), tokens(&mut rng, len)];
    let mut computed: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for turn in 0..turns {
        for (agent, history) in histories.iter_mut().enumerate() {
            let before = history.len();
            if turn > 0 {
                history.extend(tokens(&mut rng, 30));
            }
            let request = Request { context_max: len + turns * 50, ..greedy(history, 15) };
            let id = submit(engine, request);
            let answer = finish(engine).remove(&id).unwrap().unwrap();
            // The last token of an answer is not computed before the next turn.
            let new = if turn == 0 { before } else { 30 + 1 };
            assert_eq!(answer.timings.prompt_n, new, "turn {turn} of agent {agent}");
            assert_eq!(answer.reused, history.len() - new);
            history.extend(&answer.tokens);
            computed.entry(agent).or_default().push(answer.timings.prompt_n);
        }
    }
    computed
}

#[test]
fn two_agents_that_alternate_compute_only_what_is_new() {
    for architecture in [Architecture::Llama, Architecture::Gemma3] {
        let model = tiny(architecture);
        let computed = alternate(&mut engine(&model, 256), 2000, 10);
        assert!(computed.values().all(|turns| turns.len() == 10 && turns[0] == 2000));
    }
}

#[test]
fn sessions_that_begin_alike_and_come_together_compute_their_beginning_once() {
    let model = tiny(Architecture::Llama);
    let mut engine = engine(&model, 64);
    let mut rng = Rng::new(5);
    let common = tokens(&mut rng, 320);
    let requests: Vec<Request> = (0..8).map(|_| greedy(&[&common[..], &tokens(&mut rng, 10)].concat(), 6)).collect();
    let ids: Vec<_> = requests.iter().map(|r| submit(&mut engine, r.clone())).collect();
    let ended = finish(&mut engine);
    for (i, (id, request)) in ids.iter().zip(requests).enumerate() {
        let answer = ended[id].as_ref().unwrap();
        assert_eq!(answer.timings.prompt_n, if i == 0 { 330 } else { 10 });
        assert_eq!(answer.tokens, alone(&model, request).tokens);
    }
}

#[test]
fn who_gives_way_to_a_higher_class_goes_on_with_the_same_tokens() {
    let model = tiny(Architecture::Llama);
    let mut engine = engine(&model, 32);
    let mut rng = Rng::new(6);
    // What the interactive one leaves is kept for five minutes, which the other has to wait for: here a step takes ten
    // seconds.
    let steps = AtomicU64::new(0);
    engine.set_clock(Box::new(move || 10_000 * steps.fetch_add(1, Ordering::SeqCst)));
    // Room for one and a half of them.
    let bytes = engine.runner().kv_bytes_per_token() * 240;
    engine.runner().set_kv_limit(Some(bytes));
    let job = Request { class: Class::Batch, ..drawn(&tokens(&mut rng, 120), 40, 1) };
    let talk = drawn(&tokens(&mut rng, 120), 40, 2);
    let job_id = submit(&mut engine, job.clone());
    (0..10).for_each(|_| step(&mut engine));
    assert_eq!(engine.load(), (1, 0));
    let talk_id = submit(&mut engine, talk.clone());
    let gave_way = (0..40).any(|_| {
        step(&mut engine);
        engine.load() == (1, 1)
    });
    assert!(gave_way, "there is no room for both");
    let ended = finish(&mut engine);
    assert_eq!(ended[&job_id].as_ref().unwrap().tokens, alone(&model, job).tokens);
    assert_eq!(ended[&talk_id].as_ref().unwrap().tokens, alone(&model, talk).tokens);
    let order: Vec<RequestId> = ended.keys().copied().collect();
    assert_eq!(order, [job_id, talk_id]);
}

#[test]
fn who_can_never_fit_is_refused_with_the_numbers_and_the_others_go_on() {
    let model = tiny(Architecture::Llama);
    let mut engine = engine(&model, 32);
    let mut rng = Rng::new(8);
    let per_token = engine.runner().kv_bytes_per_token();
    engine.runner().set_kv_limit(Some(per_token * 160));
    let small = greedy(&tokens(&mut rng, 50), 10);
    let large = submit(&mut engine, greedy(&tokens(&mut rng, 200), 10));
    let small_id = submit(&mut engine, small.clone());
    let ended = finish(&mut engine);
    let Err(Error::KvFull(shortage)) = &ended[&large] else { panic!("{:?}", ended[&large]) };
    assert_eq!((shortage.limit_bytes, shortage.wanted_bytes), (per_token * 160, per_token * 208));
    assert_eq!(ended[&small_id].as_ref().unwrap().tokens, alone(&model, small).tokens);

    // One whose answer outgrows the memory fails when it does.
    let id = submit(&mut engine, greedy(&tokens(&mut rng, 100), 100));
    assert!(matches!(finish(&mut engine)[&id], Err(Error::KvFull(_))));
}

#[test]
fn an_interactive_answer_beside_a_long_background_prompt_has_a_token_in_every_step() {
    let model = tiny(Architecture::Llama);
    let mut engine = engine(&model, 256);
    let mut rng = Rng::new(9);
    let job = Request { class: Class::Background, ..greedy(&tokens(&mut rng, 8000), 4) };
    let job = submit(&mut engine, job);
    (0..3).for_each(|_| step(&mut engine));
    let talk = submit(&mut engine, greedy(&tokens(&mut rng, 20), 200));
    let (mut light, mut heavy, mut came) = (0, 0, 0);
    while came < 200 {
        let mut tokens = 0;
        let stepped = engine.step(&mut |id, what| {
            tokens += usize::from(id == talk && matches!(what, engine::Progress::Text(_)));
            std::ops::ControlFlow::Continue(())
        });
        // The last one may come with what was held back before it.
        assert!(tokens == 1 || tokens == 2 && came == 199, "{tokens} after {came}");
        came += 1;
        assert!(stepped.rows <= 256);
        if came > 1 {
            if stepped.rows > 1 { heavy += 1 } else { light += 1 }
        }
    }
    // The 95th percentile of the gaps is one without a chunk beside it.
    assert!(heavy > 0 && heavy * 20 < heavy + light, "{heavy} of {} steps", heavy + light);
    let ended = finish(&mut engine);
    assert_eq!(ended[&job].as_ref().unwrap().tokens.len(), 4, "and the job gets done");
}
