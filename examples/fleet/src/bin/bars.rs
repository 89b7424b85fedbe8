//! `just bars`: the default strategies against the bars, on real traces in simulated time.

use std::process::ExitCode;

use warmroute_fleet::simulator::args::BARS_HELP;
use warmroute_fleet::simulator::{args, bars};

fn main() -> ExitCode {
    let parsed = args::parse_bars(std::env::args().skip(1));
    let args = match args::or_help(parsed, BARS_HELP) {
        Ok(args) => args,
        Err(code) => return code,
    };
    if args.traces.is_none() {
        eprintln!("no traces: the conversation is generated, other traces are not run (see --help)");
    }
    let (verdicts, results) = bars::run(&args, |line| eprintln!("{line}"));
    print!("{}", bars::table(&verdicts));
    let rows: Vec<_> = results
        .rows()
        .map(|(scenario, policy, summary)| {
            serde_json::json!({"scenario": scenario, "policy": policy, "figures": summary})
        })
        .collect();
    let report = serde_json::json!({
        "seeds": args.seeds,
        "is_generated": args.traces.is_none(),
        "lines": verdicts.iter().map(|verdict| {
            serde_json::json!({
                "scenario": verdict.scenario, "what": verdict.what, "bar": verdict.bar,
                "is_least": verdict.is_least, "figures": verdict.figures, "holds": verdict.holds(),
            })
        }).collect::<Vec<_>>(),
        "rows": rows,
    });
    if let Err(error) = args::write_report("bars.json", &format!("{report:#}\n")) {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }
    let short = verdicts.iter().filter(|verdict| !verdict.holds()).count();
    println!("{} of {} lines hold", verdicts.len() - short, verdicts.len());
    ExitCode::from(u8::from(short > 0))
}
