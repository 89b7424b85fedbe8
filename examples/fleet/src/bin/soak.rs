//! Long runs before real Envoys; see `soak --help` for which there are. Prints what was checked, writes it to
//! `target/reports/`, and exits with 1 where a check failed.

use std::process::ExitCode;

use warmroute_fleet::soak::args::{Args, Run, USAGE};
use warmroute_fleet::soak::report::Report;
use warmroute_fleet::soak::stand::Failure;
use warmroute_fleet::soak::{bounds, churn, twins};

fn main() -> ExitCode {
    match soak() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("soak: {error}");
            ExitCode::FAILURE
        }
    }
}

fn soak() -> Result<bool, Failure> {
    let Some(args) = Args::parse(std::env::args().skip(1))? else {
        println!("{USAGE}");
        return Ok(true);
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let (name, report) = runtime.block_on(run(&args))?;
    println!("{report}");
    println!("written to {}", report.write(name)?.display());
    Ok(report.holds())
}

async fn run(args: &Args) -> Result<(&'static str, Report), Failure> {
    let (envoy, seed) = (args.find_envoy()?, args.seed);
    Ok(match args.run {
        Run::Churn => {
            let plan = churn::Plan::of(envoy, args.duration, seed);
            ("soak", churn::run(&plan).await?)
        }
        Run::Twins => {
            let plan = twins::Plan {
                envoy,
                requests: args.count.unwrap_or(1_000_000),
                seed,
                senders: 16,
            };
            ("million", twins::run(&plan).await?)
        }
        Run::Sizes => {
            let plan = bounds::Sizes {
                envoy,
                requests: args.count.unwrap_or(100_000),
                seed,
            };
            ("soak-sizes", bounds::sizes(&plan).await?)
        }
        Run::Pods => {
            let plan = bounds::Pods {
                envoy,
                addresses: u32::try_from(args.count.unwrap_or(10_000))?,
                at_a_time: 16,
            };
            ("soak-pods", bounds::pods(&plan).await?)
        }
    })
}
