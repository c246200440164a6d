//! Attention: near a plain computation, and the same bits on every path.

use fixtures::rng::Rng;
use kernels::attention::{
    HEAD_LEN_MAX, KV_BLOCK, KeyBias, KvBlocks, KvType, Run, SPLIT, Scratch, Shape, Terms, Turns, attention, write_kv,
};
use kernels::isa::{Isa, Level};
use kernels::math::f16_to_f32;
use kernels::threads::Pool;

struct Case {
    shape: Shape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    sinks: Option<Vec<f32>>,
    bias: Option<Bias>,
    tokens: usize,
}

impl Case {
    /// Queries of a position.
    fn queries(&self, t: usize) -> &[f32] {
        let row = self.shape.heads * self.shape.head_len;
        &self.q[t * row..][..row]
    }

    /// Keys and values of a position, as they are written.
    fn kv(&self, t: usize) -> (&[f32], &[f32]) {
        let (k, v) = (self.shape.heads_kv * self.shape.head_len, self.shape.heads_kv * self.shape.value_len);
        (&self.k[t * k..][..k], if self.shape.shared { &[] } else { &self.v[t * v..][..v] })
    }

    fn terms(&self) -> Terms<'_> {
        let key_bias = self.bias.as_ref().map(|b| {
            let turns = Turns { pairs: b.pairs, rows: &b.rows, within: &b.within };
            KeyBias { bias: &b.bias, pairs: &b.taken, turns }
        });
        Terms { sinks: self.sinks.as_deref(), key_bias }
    }
}

/// A part of all keys, as [`KeyBias`] has it.
struct Bias {
    bias: Vec<f32>,
    /// Pairs of each KV head that have one.
    taken: Vec<Vec<u16>>,
    pairs: usize,
    rows: Vec<f32>,
    within: Vec<f32>,
}

/// Cosines and sines of `position`, `magnitude` long.
fn turn(pairs: usize, position: usize, magnitude: f64) -> impl Iterator<Item = (f32, f32)> {
    (0..pairs).map(move |i| {
        let angle = position as f64 * 100f64.powf(-(i as f64) / pairs as f64);
        ((angle.cos() * magnitude) as f32, (angle.sin() * magnitude) as f32)
    })
}

fn case(
    heads: usize,
    heads_kv: usize,
    head_len: usize,
    window: Option<usize>,
    cap: Option<f32>,
    tokens: usize,
) -> Case {
    let mut rng = Rng::new((heads * 1000 + head_len + tokens) as u64);
    let shape = Shape {
        heads,
        heads_kv,
        head_len,
        value_len: head_len,
        shared: false,
        scale: 1.0 / (head_len as f32).sqrt(),
        window,
        soft_cap: cap,
        type_k: KvType::F16,
        type_v: KvType::F16,
    };
    Case {
        shape,
        q: rng.normals(tokens * heads * head_len, 1.5),
        k: rng.normals(tokens * heads_kv * head_len, 1.5),
        v: rng.normals(tokens * heads_kv * head_len, 1.0),
        sinks: None,
        bias: None,
        tokens,
    }
}

/// Values of another length, apart from the keys or their beginnings.
fn with_values(mut case: Case, value_len: usize, shared: bool) -> Case {
    let (n, shape) = (case.shape.head_len, &mut case.shape);
    (shape.value_len, shape.shared) = (value_len, shared);
    case.v = match shared {
        true => case.k.chunks_exact(n).flat_map(|key| &key[..value_len]).copied().collect(),
        false => Rng::new(7).normals(case.tokens * shape.heads_kv * value_len, 1.0),
    };
    case
}

fn with_types(mut case: Case, type_k: KvType, type_v: KvType) -> Case {
    (case.shape.type_k, case.shape.type_v) = (type_k, type_v);
    case
}

/// Some sinks weigh nothing, some nearly all.
fn with_sinks(mut case: Case) -> Case {
    case.sinks = Some((0..case.shape.heads).map(|head| head as f32 * 3.0 - 5.0).collect());
    case
}

/// Keys get a part in addition that is longer than they are, `pairs` of it rotated, of which some have none, and all of the last
/// head.
fn with_bias(mut case: Case, pairs: usize) -> Case {
    let (heads, n) = (case.shape.heads_kv, case.shape.head_len);
    let mut bias = Rng::new(7).normals(heads * n, 3.0);
    let taken: Vec<Vec<u16>> = (0..heads)
        .map(|head| (0..pairs as u16).filter(|i| head + 1 < heads && (head + usize::from(*i)) % 3 > 0).collect())
        .collect();
    for (head, taken) in bias.chunks_exact_mut(n).zip(&taken) {
        for i in (0..pairs).filter(|i| !taken.contains(&(*i as u16))) {
            (head[i], head[pairs + i]) = (0.0, 0.0);
        }
    }
    let (mut rows, mut within) = (Vec::new(), vec![0.0; pairs * 2 * KV_BLOCK]);
    for position in 0..case.tokens.next_multiple_of(KV_BLOCK) {
        let row: Vec<_> = turn(pairs, position, 1.25).collect();
        rows.extend(row.iter().map(|r| r.0).chain(row.iter().map(|r| r.1)));
    }
    for position in 0..KV_BLOCK {
        for (pair, (cos, sin)) in within.chunks_exact_mut(2 * KV_BLOCK).zip(turn(pairs, position, 1.0)) {
            (pair[position], pair[KV_BLOCK + position]) = (cos, sin);
        }
    }
    case.bias = Some(Bias { bias, taken, pairs, rows, within });
    case
}

/// Writes and attends in chunks of `chunk` tokens; the cache holds two layers, of which the second is used.
fn run(case: &Case, level: Level, threads: usize, chunk: usize) -> Vec<f32> {
    let shape = &case.shape;
    let (row, layer) = (shape.heads * shape.head_len, shape.block_bytes());
    let mut pool = Pool::new(threads);
    let mut scratch = Scratch::default();
    // Whatever is in positions that are not written yet must not be touched: here NaN, in values and in scales.
    let fresh = || vec![0xff; 2 * layer].into_boxed_slice();
    let mut blocks: Vec<Box<[u8]>> = Vec::new();
    let mut out = vec![0.0; case.tokens * shape.heads * shape.value_len];
    for first in (0..case.tokens).step_by(chunk) {
        let n = chunk.min(case.tokens - first);
        for t in first..first + n {
            if t % KV_BLOCK == 0 {
                blocks.push(fresh());
            }
            let (k, v) = case.kv(t);
            write_kv(level, shape, &mut blocks[t / KV_BLOCK][layer..], t % KV_BLOCK, case.queries(t), k, v);
        }
        let views: Vec<&[u8]> = blocks.iter().map(|block| &block[layer..]).collect();
        let kv = KvBlocks { blocks: &views };
        let run = Run { kv, first, tokens: n, position: first };
        attention(&mut pool, level, shape, &[run], &case.q, row, case.terms(), &mut out, &mut scratch);
    }
    out
}

fn half(x: f32) -> f64 {
    f64::from(f16_to_f32(kernels::math::f32_to_f16(x)))
}

fn plain(case: &Case) -> Vec<f64> {
    let s = &case.shape;
    let (n, value_len, group) = (s.head_len, s.value_len, s.heads / s.heads_kv);
    let mut out = vec![0.0; case.tokens * s.heads * value_len];
    for t in 0..case.tokens {
        for head in 0..s.heads {
            let kv = |x: &[f32], p: usize, len: usize, i: usize| half(x[(p * s.heads_kv + head / group) * len + i]);
            let first = s.window.map_or(0, |w| (t + 1).saturating_sub(w));
            let key_bias = |p: usize, i: usize| {
                let Some(b) = &case.bias else { return 0.0 };
                let (of, x) = (|i: usize| f64::from(b.bias[head / group * n + i]), 2 * b.pairs);
                let (cos, sin) = turn(b.pairs, p, 1.25).nth(i % b.pairs).expect("a pair");
                let (cos, sin) = (f64::from(cos), f64::from(sin));
                match i {
                    _ if i >= x => of(i),
                    _ if i < b.pairs => of(i) * cos - of(b.pairs + i) * sin,
                    _ => of(i) * cos + of(i - b.pairs) * sin,
                }
            };
            let mut scores: Vec<f64> = (first..=t)
                .map(|p| {
                    let key = |i| kv(&case.k, p, n, i) + key_bias(p, i);
                    let dot: f64 = (0..n).map(|i| f64::from(case.q[(t * s.heads + head) * n + i]) * key(i)).sum();
                    let score = dot * f64::from(s.scale);
                    s.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                })
                .collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            scores.iter_mut().for_each(|x| *x = (*x - max).exp());
            let sink = case.sinks.as_ref().map_or(0.0, |sinks| (f64::from(sinks[head]) - max).exp());
            let sum: f64 = scores.iter().sum::<f64>() + sink;
            for i in 0..value_len {
                let y: f64 = scores.iter().enumerate().map(|(p, w)| w * kv(&case.v, first + p, value_len, i)).sum();
                out[(t * s.heads + head) * value_len + i] = y / sum;
            }
        }
    }
    out
}

fn cases() -> Vec<Case> {
    vec![
        case(9, 3, 64, None, None, 2 * SPLIT + 37),
        case(4, 1, 256, Some(40), None, SPLIT + 50),
        case(14, 2, 64, None, None, 75),
        case(2, 2, 80, Some(300), Some(5.0), SPLIT + 90),
        case(16, 1, 128, None, None, 33),
        case(70, 1, 32, None, None, 20),
        case(5, 5, 48, Some(3), None, 100),
        with_types(case(16, 8, 32, Some(300), None, 2 * SPLIT + 37), KvType::Q8_0, KvType::F16),
        with_sinks(case(8, 2, 64, None, None, 3 * SPLIT + 1)),
        with_sinks(case(8, 1, 32, Some(20), None, 50)),
        with_types(case(9, 3, 64, None, None, 2 * SPLIT + 37), KvType::Q8_0, KvType::Q8_0),
        with_types(case(4, 1, 256, Some(40), None, SPLIT + 50), KvType::Q4_0, KvType::Q4_0),
        with_types(case(14, 2, 64, None, None, 75), KvType::Q8_0, KvType::Q4_0),
        with_types(case(4, 2, 96, None, None, 60), KvType::Q4_0, KvType::F16),
        with_values(case(4, 2, 96, None, None, SPLIT + 60), 32, false),
        with_types(with_values(case(4, 4, 32, None, None, 50), 64, false), KvType::Q8_0, KvType::Q4_0),
        with_values(case(9, 1, HEAD_LEN_MAX, None, None, SPLIT + 20), 512, true),
        with_values(case(6, 2, 96, Some(40), Some(5.0), 75), 32, true),
        with_types(with_values(case(4, 1, 160, None, None, SPLIT + 21), 128, true), KvType::Q8_0, KvType::Q8_0),
        with_types(with_values(case(3, 1, 96, Some(40), None, 75), 64, true), KvType::Q4_0, KvType::Q4_0),
        with_bias(case(9, 3, 32, None, None, SPLIT + 37), 16),
        with_bias(with_types(case(14, 2, 64, Some(50), None, 75), KvType::Q8_0, KvType::Q8_0), 20),
    ]
}

#[test]
fn attention_is_near_a_plain_computation() {
    for case in cases() {
        let (got, want) = (run(&case, Level::detect(), 2, 29), plain(&case));
        let worst = got.iter().zip(&want).map(|(&g, &w)| (f64::from(g) - w).abs()).fold(0.0, f64::max);
        // Values of standard deviation 1, or of 1.5 as keys: half a step of 127 or of 7 in the largest of 32, and what scores lose.
        let limit = |ty| -> f64 {
            match ty {
                KvType::F16 => 2e-5,
                KvType::Q8_0 => 0.08,
                KvType::Q4_0 => 0.9,
            }
        };
        let size = if case.shape.shared { 1.5 } else { 1.0 };
        let limit = size * limit(case.shape.type_k).max(limit(case.shape.type_v));
        assert!(worst < limit, "{:?}: {worst:e}", case.shape);
        assert!(want.iter().any(|w| w.abs() > 0.1));
    }
}

#[test]
fn every_isa_thread_count_and_chunk_gives_the_bits_of_the_scalar_definition() {
    for case in cases() {
        let want = run(&case, Level::new(Isa::Scalar).expect("always there"), 1, case.tokens);
        for level in Isa::ALL.iter().filter_map(|&isa| Level::new(isa)) {
            for (threads, chunk) in [(1, 1), (2, case.tokens), (3, 7), (2, 16)] {
                let got = run(&case, level, threads, chunk);
                let same = got.iter().zip(&want).all(|(g, w)| g.to_bits() == w.to_bits());
                assert!(same, "{:?} {} {threads} threads, chunks of {chunk}", case.shape, level.isa());
            }
        }
    }
}

/// Sequences of one shape in one call, each at a place of its own: some at their beginning, some far on.
#[test]
fn runs_of_many_sequences_in_one_call_have_the_bits_of_each_alone() {
    let lengths = [(2 * SPLIT + 60, 1), (3, 1), (40, 40), (SPLIT + 20, 5), (1, 1), (4 * SPLIT + 1, 1)];
    for (type_k, type_v) in [(KvType::F16, KvType::F16), (KvType::Q8_0, KvType::Q4_0)] {
        let cases: Vec<Case> =
            lengths.iter().map(|&(len, _)| with_types(case(6, 2, 64, None, None, len), type_k, type_v)).collect();
        let shape = cases[0].shape;
        let row = shape.heads * shape.head_len;
        let level = Level::detect();
        let caches: Vec<Vec<Box<[u8]>>> = cases.iter().map(|case| cache(case, level)).collect();
        let views: Vec<Vec<&[u8]>> =
            caches.iter().map(|blocks| blocks.iter().map(|block| &**block).collect()).collect();
        let (mut q, mut runs, mut want) = (Vec::new(), Vec::new(), Vec::new());
        for ((case, blocks), &(len, tokens)) in cases.iter().zip(&views).zip(&lengths) {
            let (first, position) = (q.len() / row, len - tokens);
            runs.push(Run { kv: KvBlocks { blocks }, first, tokens, position });
            q.extend_from_slice(&case.q[position * row..]);
            want.extend_from_slice(&run(case, level, 1, len)[position * row..]);
        }
        for threads in [1, 2, 3] {
            let mut pool = Pool::new(threads);
            let mut out = vec![0.0; q.len()];
            // Twice with the same scratch: nothing of the first call is left for the second.
            let mut scratch = Scratch::default();
            for runs in [&runs[..], &runs[..1], &runs[2..], &runs[..]] {
                out.fill(-7.0);
                attention(&mut pool, level, &shape, runs, &q, row, Terms::default(), &mut out, &mut scratch);
                for (i, (got, want)) in out.chunks_exact(row).zip(want.chunks_exact(row)).enumerate() {
                    if runs.iter().any(|r| (r.first..r.first + r.tokens).contains(&i)) {
                        let same = got.iter().zip(want).all(|(g, w)| g.to_bits() == w.to_bits());
                        assert!(same, "row {i}, {threads} threads");
                    } else {
                        assert!(got.iter().all(|&x| x == -7.0), "row {i} is in no run");
                    }
                }
            }
        }
    }
}

/// All keys and values of a case.
fn cache(case: &Case, level: Level) -> Vec<Box<[u8]>> {
    let shape = &case.shape;
    let mut blocks = vec![vec![0xff; shape.block_bytes()].into_boxed_slice(); case.tokens.div_ceil(KV_BLOCK)];
    for t in 0..case.tokens {
        let (k, v) = case.kv(t);
        write_kv(level, shape, &mut blocks[t / KV_BLOCK], t % KV_BLOCK, case.queries(t), k, v);
    }
    blocks
}
