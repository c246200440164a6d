//! `airs logits`: the largest logits after a list of tokens.

use std::ops::ControlFlow;

use serde_json::{Value, json};

use crate::failure::Failure;
use crate::flags::{Logits, Settings};
use crate::interrupt::Stoppable;
use crate::open::open;
use crate::planning::Need;
use crate::terminal::{print, print_json};

/// The largest logits at a position, largest first, the lowest id first among equals.
struct Top(Vec<(u32, f32)>);

impl Top {
    fn new(logits: &[f32], n: usize) -> Top {
        let mut all: Vec<(u32, f32)> = logits.iter().enumerate().map(|(id, &v)| (id as u32, v)).collect();
        let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if n < all.len() {
            all.select_nth_unstable_by(n, order);
            all.truncate(n);
        }
        all.sort_unstable_by(order);
        Top(all)
    }

    fn json(&self) -> Value {
        let pairs: Vec<Value> = self.0.iter().map(|&(id, v)| json!([id, v])).collect();
        json!({"argmax": self.0.first().map(|t| t.0), "top": pairs})
    }
}

pub(crate) fn execute(args: &Logits, settings: &Settings) -> Result<(), Failure> {
    let mut opened = open(settings, args.model.name(), &args.compute, Need::all_logits(args.tokens.0.len()))?;
    opened.say_mode("");
    let tokens = &args.tokens.0;
    let from = if args.all { 0 } else { tokens.len() - 1 };
    let mut tops = Vec::new();
    let stoppable = Stoppable::begin();
    let mut flow = ControlFlow::Continue(());
    opened.engine.logits(tokens, from, &mut |_, logits| {
        tops.push(Top::new(logits, args.top));
        flow = stoppable.flow();
        flow
    })?;
    if flow.is_break() {
        return Err(Failure::Interrupted);
    }
    if args.output.json() {
        return match (&tops[..], args.all) {
            ([only], false) => print_json(&only.json()),
            _ => print_json(&tops.iter().map(Top::json).collect()),
        };
    }
    let mut text = String::new();
    for (i, top) in tops.iter().enumerate() {
        text += &format!("after token {} (position {})\n", tokens[from + i], from + i);
        for &(id, value) in &top.0 {
            let piece = opened.model().tokenizer.token_bytes(id, true);
            text += &format!("{id:>8} {value:>10.4}  {:?}\n", String::from_utf8_lossy(&piece));
        }
    }
    print(&text)
}

#[cfg(test)]
mod tests {
    use super::Top;

    #[test]
    fn the_largest_come_first_and_equals_by_id() {
        assert_eq!(Top::new(&[1.0, 3.0, 2.0, 3.0], 3).0, [(1, 3.0), (3, 3.0), (2, 2.0)]);
        assert_eq!(Top::new(&[1.0, 3.0], 20).0, [(1, 3.0), (0, 1.0)]);
    }
}
