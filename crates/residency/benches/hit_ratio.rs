//! Hits of every policy on recorded conversations, beside the limit: `cargo bench -p residency`.

use fixtures::route_trace::{RouteSpec, made_up, recorded};
use residency::experts::Trace;
use residency::experts::policy::{Belady, Heat, Lru, Policy, TokenStamp};

const SHARES: [f64; 6] = [0.03, 0.05, 0.1, 0.2, 0.3, 0.5];

fn row(trace: &Trace, policy: impl Policy + Clone) {
    let hits = SHARES.map(|share| {
        let slots = (f64::from(trace.layers * trace.experts) * share).round() as usize;
        trace.hit_share(policy.clone(), slots).map_or("-".to_owned(), |hits| format!("{:.1}", 100.0 * hits))
    });
    println!("  {:<12}{}", policy.name(), hits.map(|h| format!("{h:>6}")).concat());
}

fn main() {
    let shares = SHARES.map(|share| format!("{:>4.0} %", 100.0 * share)).concat();
    for name in ["qwen", "gemma", "gptoss", "made up"] {
        let text = match recorded(name) {
            Some(path) => std::fs::read_to_string(path).expect("a readable trace"),
            None if name == "made up" => {
                made_up(&RouteSpec { layers: 24, experts: 64, used: 4, prompt: 20, decode: 100, again: 0.35, seed: 5 })
            }
            None => {
                println!("{name}: no recorded trace here");
                continue;
            }
        };
        let trace = Trace::parse(&text).expect("a trace");
        println!("{name}: hits in % of uses by generated tokens\n  {:<12}{shares}", "");
        row(&trace, Lru);
        row(&trace, TokenStamp);
        row(&trace, Heat::default());
        row(&trace, Belady::new(trace.uses()));
    }
}
