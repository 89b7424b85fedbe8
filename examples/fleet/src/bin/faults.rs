//! `just faults`: the fault matrix, and the table of docs/reliability.md made from it.

use std::fs;
use std::process::ExitCode;

use warmroute_fleet::envoy;
use warmroute_fleet::faults::args::{Args, Command, HELP};
use warmroute_fleet::faults::play::{Plan, play};
use warmroute_fleet::faults::{FaultError, Row, Scenario, in_document, scenarios, table, with_rows};
use warmroute_fleet::process::workspace_root;

#[tokio::main]
async fn main() -> ExitCode {
    let args = match Command::parse(std::env::args().skip(1)) {
        Ok(Command::Run(args)) => args,
        Ok(Command::Help) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Ok(Command::List) => {
            for scenario in scenarios() {
                println!("{}", scenario.name());
            }
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    match run(&args).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether every row holds.
async fn run(args: &Args) -> Result<bool, FaultError> {
    let is_wanted =
        |scenario: &Scenario| args.asks_for(&scenario.name()) && (scenario.is_short || !args.is_short);
    let wanted = scenarios().into_iter().filter(is_wanted).collect();
    let plan = Plan {
        envoys: args
            .envoys
            .iter()
            .map(|envoy| envoy::find(*envoy))
            .collect::<Result<_, _>>()?,
        is_short: args.is_short,
        at_a_time: args.jobs,
    };
    let played = play(wanted, &plan, |played| match &played.row {
        Ok(row) => println!("{}", line(row)),
        Err(error) => println!(
            "{} under {} could not be run: {error}",
            played.name, played.policy
        ),
    });
    let (rows, errors): (Vec<_>, Vec<_>) = played
        .await
        .into_iter()
        .map(|played| played.row)
        .partition(Result::is_ok);
    let rows: Vec<Row> = rows.into_iter().flatten().collect();
    let missing = errors.len();
    let table = table(&rows);
    fs::create_dir_all(workspace_root().join("target/reports"))?;
    fs::write(workspace_root().join("target/reports/faults.md"), &table)?;
    if args.write {
        let path = workspace_root().join("docs/reliability.md");
        let document = fs::read_to_string(&path)?;
        let is_all = args.only.is_empty() && !args.is_short && args.envoys.len() > 1;
        let document = if is_all {
            in_document(&document, &table)
        } else {
            with_rows(&document, &table)
        };
        match document {
            Some(document) => fs::write(&path, document)?,
            None => eprintln!("docs/reliability.md has no place for the table"),
        }
    }
    let broken = rows.iter().filter(|row| !row.broken.is_empty()).count();
    println!(
        "{} rows, {broken} do not hold, {missing} could not be run",
        rows.len()
    );
    Ok(broken == 0 && missing == 0)
}

fn line(row: &Row) -> String {
    let (major, minor, patch) = row.envoy;
    let mut line = format!(
        "{} {}: {} on {major}.{minor}.{patch} under {}: {} of {} answered, {} failed without the filter, {} because of us, \
         +{} ms",
        if row.broken.is_empty() { "ok    " } else { "BROKEN" },
        row.part,
        row.fault,
        row.policy,
        row.answered,
        row.sent,
        row.failed_plain,
        row.because_of_us,
        row.worst_added.as_millis(),
    );
    if let Some(recovery) = &row.recovery {
        line.push_str(&format!(", {recovery}"));
    }
    for text in std::iter::once(&row.note)
        .chain(&row.broken)
        .filter(|text| !text.is_empty())
    {
        line.push_str(&format!("\n         {text}"));
    }
    line
}
