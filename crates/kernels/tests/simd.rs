//! Every vector operation of every level that this machine has, on hostile values: the bits of the scalar definition.
//! And `exp` and `tanh`, which are made of them.

use fixtures::rng::Rng;
use kernels::isa::{Isa, Level};
use kernels::math::{exp, f16_to_f32, tanh};
use kernels::simd::{Op, Simd};

/// Results of each operation, in panels of 16 lanes.
type Results = Vec<(String, Vec<u32>)>;

/// Runs `op` at each level and compares with the scalar one.
fn compare<O: Op<Out = Results> + Copy>(op: O) {
    let want = Level::new(Isa::Scalar).expect("always there").run(op);
    assert!(!want.is_empty());
    for level in Isa::ALL.iter().filter_map(|&isa| Level::new(isa)) {
        let got = level.run(op);
        assert_eq!(got.len(), want.len());
        for ((name, got), (_, want)) in got.iter().zip(&want) {
            assert!(got.len() == want.len() && want.iter().any(|&w| w != want[0]), "{name}: a constant proves nothing");
            let wrong = got.iter().zip(want).position(|(g, w)| g != w);
            if let Some(i) = wrong {
                panic!("{} {name}, lane {i}: {:08x}, not {:08x}", level.isa(), got[i], want[i]);
            }
        }
    }
}

/// Stands for every NaN where the standard leaves open which one a result is.
fn one_nan(x: f32) -> u32 {
    if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }
}

/// Floats where something changes: signs, exponents, ties, the ends of integers and of halves.
fn edges() -> Vec<f32> {
    let positive = [
        0.0,
        f32::from_bits(1),
        f32::from_bits(0x7f_ffff),
        f32::MIN_POSITIVE,
        f32::from_bits(0x3300_0000),
        f32::from_bits(0x3300_0001),
        6.1e-5,
        0.1,
        0.499_999_97,
        0.5,
        0.500_000_06,
        1.0,
        1.5,
        2.5,
        3.5,
        87.3,
        88.0,
        126.5,
        127.499_99,
        127.5,
        128.0,
        128.5,
        129.0,
        255.5,
        32767.5,
        65504.0,
        65519.996,
        65520.0,
        4_194_304.5,
        8_388_607.5,
        8_388_609.0,
        16_777_219.0,
        2_147_483_500.0,
        2_147_483_648.0,
        1e10,
        f32::MAX,
        f32::INFINITY,
        f32::from_bits(0x7fc0_0000),
        f32::from_bits(0x7fed_cba9),
    ];
    positive.into_iter().flat_map(|x| [x, -x]).collect()
}

/// `n` floats of any bits but signalling NaNs, whose treatment the standard leaves open.
fn any_floats(rng: &mut Rng, n: usize) -> Vec<f32> {
    let quiet = |x: f32| if x.is_nan() { f32::from_bits(x.to_bits() | 0x40_0000) } else { x };
    (0..n).map(|_| quiet(f32::from_bits(rng.u64() as u32))).collect()
}

#[derive(Clone, Copy)]
struct Floats<'a> {
    a: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
}

impl Floats<'_> {
    #[inline(always)]
    fn map<S: Simd>(&self, s: S, f: impl Fn(S::F, S::F, S::F) -> S::F) -> Vec<f32> {
        let mut out = vec![0.0; self.a.len()];
        for at in (0..out.len()).step_by(S::LANES) {
            let y = f(s.f_load(&self.a[at..]), s.f_load(&self.b[at..]), s.f_load(&self.c[at..]));
            s.f_store(y, &mut out[at..]);
        }
        out
    }
}

impl Op for Floats<'_> {
    type Out = Results;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Results {
        let mut results = Results::new();
        // Moved as they are: NaNs too keep their bits.
        let mut exact = |name: &str, out: Vec<f32>| {
            results.push((name.to_owned(), out.into_iter().map(f32::to_bits).collect()));
        };
        exact("load", self.map(s, |a, _, _| a));
        exact("abs", self.map(s, |a, _, _| s.f_abs(a)));
        exact("max", self.map(s, |a, b, _| s.f_max(a, b)));
        exact("min", self.map(s, |a, b, _| s.f_min(a, b)));
        let mut rounded = |name: &str, out: Vec<f32>| {
            results.push((name.to_owned(), out.into_iter().map(one_nan).collect()));
        };
        rounded("add", self.map(s, |a, b, _| s.f_add(a, b)));
        rounded("sub", self.map(s, |a, b, _| s.f_sub(a, b)));
        rounded("mul", self.map(s, |a, b, _| s.f_mul(a, b)));
        rounded("div", self.map(s, |a, b, _| s.f_div(a, b)));
        rounded("fma", self.map(s, |a, b, c| s.f_fma(a, b, c)));
        rounded("round", self.map(s, |a, _, _| s.f_round(a)));
        rounded("exp", self.map(s, |a, _, _| exp(s, a)));
        rounded("tanh", self.map(s, |a, _, _| tanh(s, a)));
        results
    }
}

#[test]
fn float_operations_round_as_the_definition() {
    let edges = edges();
    let mut rng = Rng::new(1);
    let mut pairs: Vec<(f32, f32)> = edges.iter().flat_map(|&a| edges.iter().map(move |&b| (a, b))).collect();
    let (a, b) = (any_floats(&mut rng, 40_000), any_floats(&mut rng, 40_000));
    pairs.extend(a.into_iter().zip(b));
    // Exponents near each other, where sums cancel and products are neither 0 nor infinite.
    pairs.extend((0..40_000).map(|_| (rng.range(-100.0, 100.0), rng.range(-2.0, 2.0))));
    pairs.truncate(pairs.len() / 16 * 16);
    let (a, b): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
    let mut c = any_floats(&mut rng, a.len());
    for i in (0..a.len()).step_by(2) {
        // Near what it is added to.
        c[i] = -(a[i] * b[i]);
        c[i] = if c[i].is_nan() { edges[i % edges.len()] } else { c[i] };
    }
    compare(Floats { a: &a, b: &b, c: &c });
}

#[derive(Clone, Copy)]
struct Halves<'a> {
    bits: &'a [u16],
    bytes: &'a [u8],
    floats: &'a [f32],
}

impl Op for Halves<'_> {
    type Out = Results;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Results {
        let load = |f: &dyn Fn(usize) -> S::F| {
            let mut out = vec![0.0; self.bits.len()];
            for at in (0..out.len()).step_by(S::LANES) {
                s.f_store(f(at), &mut out[at..]);
            }
            out.into_iter().map(f32::to_bits).collect()
        };
        let mut stored = vec![0u16; self.floats.len()];
        for at in (0..stored.len()).step_by(S::LANES) {
            s.f_store_half(s.f_load(&self.floats[at..]), &mut stored[at..]);
        }
        vec![
            ("load_half".to_owned(), load(&|at| s.f_load_half(&self.bits[at..]))),
            ("load_f16".to_owned(), load(&|at| s.f_load_f16(&self.bytes[2 * at..]))),
            ("load_bf16".to_owned(), load(&|at| s.f_load_bf16(&self.bytes[2 * at..]))),
            ("store_half".to_owned(), stored.into_iter().map(u32::from).collect()),
        ]
    }
}

#[test]
fn every_half_is_loaded_exactly_and_stored_rounded_to_nearest_even() {
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
    let mut floats = Vec::new();
    for &h in &bits {
        // The half itself, what lies in the middle of it and the next, and their neighbours.
        let x = f16_to_f32(h).to_bits();
        let next = f16_to_f32(h.wrapping_add(1)).to_bits();
        let middle = x.wrapping_add(next.wrapping_sub(x) / 2);
        let near = |x: u32| [x.wrapping_sub(1), x, x.wrapping_add(1)].map(f32::from_bits);
        floats.extend(near(x).into_iter().chain(near(middle)));
    }
    let edges = edges();
    floats.extend(&edges);
    floats.extend(any_floats(&mut Rng::new(2), 50_000));
    floats.truncate(floats.len() / 16 * 16);
    compare(Halves { bits: &bits, bytes: &bytes, floats: &floats });
}

#[derive(Clone, Copy)]
struct ToIntegers<'a>(&'a [f32]);

impl Op for ToIntegers<'_> {
    type Out = Results;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Results {
        let mut bytes = vec![0i8; self.0.len()];
        let mut words = vec![0.0; self.0.len()];
        for at in (0..bytes.len()).step_by(S::LANES) {
            let x = s.f_load(&self.0[at..]);
            s.f_store_i8(x, &mut bytes[at..]);
            s.f_store(s.v_as_f(s.f_to_v(x)), &mut words[at..]);
        }
        vec![
            ("store_i8".to_owned(), bytes.into_iter().map(|b| b as u32).collect()),
            ("to_v".to_owned(), words.into_iter().map(f32::to_bits).collect()),
        ]
    }
}

#[test]
fn floats_become_integers_by_rounding_to_nearest_even() {
    let mut rng = Rng::new(3);
    // What does not fit in 32 bits is outside of the definition.
    let mut x: Vec<f32> = edges().into_iter().filter(|x| x.abs() < 2_147_483_648.0).collect();
    x.extend((-600..600).map(|i| i as f32 * 0.25));
    x.extend((0..20_000).map(|_| rng.range(-140.0, 140.0)));
    x.extend((0..20_000).map(|_| rng.range(-2.1e9, 2.1e9)));
    x.truncate(x.len() / 16 * 16);
    compare(ToIntegers(&x));
}

#[derive(Clone, Copy)]
struct Lanes<'a>(&'a [f32]);

impl Op for Lanes<'_> {
    type Out = Results;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Results {
        let (mut kept, mut largest, mut sums) = (Vec::new(), Vec::new(), Vec::new());
        for x in self.0.chunks_exact(16) {
            for (from, to) in (0..=18).flat_map(|from| (0..=18).map(move |to| (from, to))) {
                let mut out = [0.0; 16];
                for at in (0..16).step_by(S::LANES) {
                    let part = |n: usize| n.saturating_sub(at);
                    let y = s.f_keep(s.f_load(&x[at..]), part(from), part(to), -7.5);
                    s.f_store(y, &mut out[at..]);
                }
                kept.extend(out.map(f32::to_bits));
            }
            let parts = || (0..16).step_by(S::LANES).map(|at| s.f_load(&x[at..]));
            largest.push(parts().map(|x| s.f_reduce_max(x)).fold(f32::NEG_INFINITY, f32::max).to_bits());
            sums.push(parts().map(|x| s.f_reduce_add(x)).sum::<f32>().to_bits());
        }
        vec![("keep".to_owned(), kept), ("reduce_max".to_owned(), largest), ("reduce_add".to_owned(), sums)]
    }
}

#[test]
fn lanes_are_kept_and_reduced_as_the_definition_says() {
    let mut rng = Rng::new(4);
    let mut x: Vec<f32> = (0..16 * 200).map(|_| (rng.below(255) as f32) - 127.0).collect();
    // The largest in every lane, and alone beside infinities.
    for i in 0..16 {
        x[16 * i + i] = 1000.0 + i as f32;
        x[16 * (16 + i)..][..16].fill(f32::NEG_INFINITY);
        x[16 * (16 + i) + i] = -3.0 - i as f32;
    }
    compare(Lanes(&x));
}

#[derive(Clone, Copy)]
struct Integers<'a> {
    a: &'a [u8],
    b: &'a [u8],
    table: [u8; 16],
}

impl Op for Integers<'_> {
    type Out = Results;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Results {
        let mut results = Results::new();
        let mut map = |name: String, f: &dyn Fn(S::V, S::V) -> S::V| {
            let mut out = vec![0.0; self.a.len() / 4];
            for at in (0..out.len()).step_by(S::LANES) {
                let y = f(s.v_load(&self.a[4 * at..]), s.v_load(&self.b[4 * at..]));
                s.f_store(s.v_as_f(y), &mut out[at..]);
            }
            results.push((name, out.into_iter().map(f32::to_bits).collect()));
        };
        map("load".to_owned(), &|a, _| a);
        map("add".to_owned(), &|a, b| s.v_add(a, b));
        map("and".to_owned(), &|a, b| s.v_and(a, b));
        map("or".to_owned(), &|a, b| s.v_or(a, b));
        map("and_or".to_owned(), &|a, b| s.v_and_or(a, b, s.v_splat(0x1248_1248)));
        map("splat".to_owned(), &|a, _| s.v_add(a, s.v_splat(-3)));
        for bits in 0..32 {
            map(format!("shr {bits}"), &|a, _| s.v_shr(a, bits));
            map(format!("shl {bits}"), &|a, _| s.v_shl(a, bits));
        }
        map("lookup".to_owned(), &|a, _| s.v_lookup(&self.table, s.v_and(a, s.v_splat(0x0f0f_0f0f))));
        let mut load = |name: &str, f: &dyn Fn(usize) -> S::F| {
            let mut out = vec![0.0; self.a.len() / 4];
            for at in (0..out.len()).step_by(S::LANES) {
                s.f_store(f(at), &mut out[at..]);
            }
            results.push((name.to_owned(), out.into_iter().map(f32::to_bits).collect()));
        };
        load("to_f", &|at| s.v_to_f(s.v_load(&self.a[4 * at..])));
        load("load_u8", &|at| s.v_as_f(s.v_load_u8(&self.a[at..])));
        load("load_i8", &|at| s.v_as_f(s.v_load_i8(&self.a[at..])));
        // Hints only: nothing is read, wherever they point.
        for offset in [0, 64, self.a.len(), usize::MAX / 2, usize::MAX] {
            s.prefetch(self.a, offset);
        }
        results
    }
}

#[test]
fn integer_operations_are_exact() {
    let mut rng = Rng::new(5);
    let edges =
        [0u32, 1, 127, 128, 255, 0x7fff, 0x8000, 0xff_ffff, 0x100_0001, 0x7fff_ffff, 0x8000_0000, 0x8000_0001, !0];
    let mut words: Vec<(u32, u32)> = edges.iter().flat_map(|&a| edges.iter().map(move |&b| (a, b))).collect();
    words.resize_with(4096, || (rng.u64() as u32, rng.u64() as u32));
    let a: Vec<u8> = words.iter().flat_map(|w| w.0.to_le_bytes()).collect();
    let b: Vec<u8> = words.iter().flat_map(|w| w.1.to_le_bytes()).collect();
    let table = std::array::from_fn(|i| (i as u8).wrapping_mul(37) ^ 0x80);
    compare(Integers { a: &a, b: &b, table });
}

/// Dot products of weights below 2^`bits` with `G` interleaved rows.
#[derive(Clone, Copy)]
struct Dots<'a, const G: usize> {
    weights: &'a [[u8; 64]; 8],
    x: &'a [[u32; G]],
    bits: u32,
}

impl<const G: usize> Op for Dots<'_, G> {
    type Out = Results;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Results {
        let mut all = Vec::new();
        for range in [0..4, 4..8, 0..8, 3..6, 7..8, 2..2] {
            for t in 0..G {
                let sum: i32 = range.clone().flat_map(|i| self.x[i][t].to_le_bytes()).map(|x| i32::from(x as i8)).sum();
                let start = if self.bits == 8 { -128 * sum } else { 1_000_000 * t as i32 - 77 };
                let mut out = [0.0; 16];
                for at in (0..16).step_by(S::LANES) {
                    let mut w = [s.v_splat(0); 8];
                    for (w, bytes) in w.iter_mut().zip(self.weights) {
                        *w = s.v_load(&bytes[4 * at..]);
                    }
                    let y = s.dot(s.v_splat(start), &w, range.clone(), self.x, t, self.bits);
                    s.f_store(s.v_as_f(y), &mut out[at..]);
                }
                all.extend(out.map(f32::to_bits));
            }
        }
        vec![(format!("dot of {} bits, groups of {G}", self.bits), all)]
    }
}

fn dots<const G: usize>(rng: &mut Rng) {
    // The widths that formats have; none has 7.
    for bits in [1, 2, 3, 4, 5, 6, 8] {
        let largest = ((1u32 << bits) - 1) as u8;
        for round in 0..12 {
            // The extremes: all that a 16-bit sum has to hold; then anything.
            let mut weights = [[largest; 64]; 8];
            let mut bytes = [127i8, -127, 127, -127][round % 4];
            let x: Vec<[u32; G]> = (0..8)
                .map(|_| {
                    std::array::from_fn(|_| {
                        u32::from_le_bytes(std::array::from_fn(|_| {
                            if round >= 4 {
                                bytes = rng.below(255) as i8;
                                bytes = if bytes == -128 { 127 } else { bytes };
                            }
                            bytes as u8
                        }))
                    })
                })
                .collect();
            for w in weights.as_flattened_mut() {
                *w = match round {
                    // One lane of the definition must differ from the others, and zeros stand for -128 with 8 bits.
                    0 | 1 => *w,
                    2 | 3 => 0,
                    _ => (rng.u64() as u8) & largest,
                };
            }
            weights[7][63] ^= 1;
            compare(Dots { weights: &weights, x: &x, bits });
        }
    }
}

#[test]
fn dot_products_are_exact_for_the_width_of_every_format() {
    let mut rng = Rng::new(6);
    dots::<1>(&mut rng);
    dots::<2>(&mut rng);
    dots::<4>(&mut rng);
    dots::<8>(&mut rng);
    dots::<16>(&mut rng);
}
