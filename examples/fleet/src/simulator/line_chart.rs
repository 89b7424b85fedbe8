//! Lines over a few points → one SVG file that needs nothing else.
//!
//! In: named lines of the same points. Out: a drawing with a background of its own, so that it reads on light and dark
//! pages alike. Both axes go in powers: points of the x axis stand at equal distances.

use std::fmt::Write as _;

/// A chart.
#[derive(Debug, Clone)]
pub struct LineChart {
    /// Said above it.
    pub title: String,
    /// What the points of the x axis are.
    pub x_name: String,
    /// What is drawn.
    pub y_name: String,
    /// Names of the points.
    pub points: Vec<String>,
    /// Lowest and highest value of the y axis; values beyond are drawn at its ends.
    pub y_range: (f64, f64),
    /// Values that get a line across.
    pub y_marks: Vec<f64>,
    /// Whether equal distances are equal ratios.
    pub is_logarithmic: bool,
    /// Name and one value a point.
    pub lines: Vec<(String, Vec<f64>)>,
}

impl LineChart {
    /// The file.
    pub fn svg(&self) -> String {
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
             font-family=\"system-ui, sans-serif\" font-size=\"13\">\n<title>{0}</title>\n\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" rx=\"8\" fill=\"#ffffff\"/>\n\
             <g fill=\"#1d2733\">\n<text x=\"20\" y=\"28\" font-size=\"16\" font-weight=\"600\">{0}</text>\n\
             <text x=\"20\" y=\"50\" fill=\"#52606d\">{1}</text>\n",
            escaped(&self.title),
            escaped(&self.y_name),
        );
        for mark in &self.y_marks {
            let y = self.y(*mark);
            let _ = writeln!(
                svg,
                "<path d=\"M{LEFT} {y:.1}H{RIGHT}\" stroke=\"#dde3ea\"/><text x=\"{:.0}\" y=\"{:.1}\" \
                 text-anchor=\"end\" fill=\"#52606d\">{mark}</text>",
                LEFT - 8.0,
                y + 4.5,
            );
        }
        for (at, name) in self.points.iter().enumerate() {
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.0}\" text-anchor=\"middle\" fill=\"#52606d\">{}</text>",
                self.x(at),
                BOTTOM + 20.0,
                escaped(name),
            );
        }
        let _ = writeln!(
            svg,
            "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\" fill=\"#52606d\">{}</text>",
            f64::midpoint(LEFT, RIGHT),
            BOTTOM + 42.0,
            escaped(&self.x_name),
        );
        let labels = self.label_heights();
        for (at, ((name, values), label_y)) in self.lines.iter().zip(labels).enumerate() {
            let (colour, dashes) = STYLES[at % STYLES.len()];
            let mut path = String::new();
            for (at, value) in values.iter().enumerate() {
                let command = if at == 0 { 'M' } else { 'L' };
                let _ = write!(path, "{command}{:.1} {:.1}", self.x(at), self.y(*value));
            }
            let _ = write!(
                svg,
                "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2.5\" stroke-dasharray=\"{dashes}\" \
                 stroke-linejoin=\"round\"/>"
            );
            for (at, value) in values.iter().enumerate() {
                let (x, y) = (self.x(at), self.y(*value));
                let _ = write!(
                    svg,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.2\" fill=\"{colour}\"/>"
                );
            }
            let end = values.last().map_or(BOTTOM, |value| self.y(*value));
            let _ = writeln!(
                svg,
                "<path d=\"M{:.1} {end:.1}L{:.1} {label_y:.1}\" stroke=\"{colour}\" stroke-width=\"0.8\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\" font-weight=\"600\">{}</text>",
                RIGHT + 5.0,
                RIGHT + 16.0,
                RIGHT + 20.0,
                label_y + 4.5,
                escaped(name),
            );
        }
        svg.push_str("</g>\n</svg>\n");
        svg
    }

    /// The same figures for the page that shows it.
    pub fn markdown(&self) -> String {
        let mut text = format!("| {} | {} |\n|---|", self.x_name, self.points.join(" | "));
        text.push_str(&"---|".repeat(self.points.len()));
        text.push('\n');
        for (name, values) in &self.lines {
            let _ = write!(text, "| {name} |");
            for value in values {
                let digits = if *value < 10.0 { 2 } else { 1 };
                let _ = write!(text, " {value:.digits$} |");
            }
            text.push('\n');
        }
        text
    }

    fn x(&self, at: usize) -> f64 {
        let steps = self.points.len().saturating_sub(1).max(1);
        LEFT + 12.0 + (RIGHT - LEFT - 12.0) * at as f64 / steps as f64
    }

    fn y(&self, value: f64) -> f64 {
        let (least, most) = self.y_range;
        let value = value.clamp(least, most);
        let share = if self.is_logarithmic {
            (value / least).ln() / (most / least).ln()
        } else {
            (value - least) / (most - least)
        };
        BOTTOM - (BOTTOM - TOP) * share
    }

    /// Where the names stand at the right: beside the ends of their lines, pushed apart.
    fn label_heights(&self) -> Vec<f64> {
        let ends: Vec<f64> = self
            .lines
            .iter()
            .map(|line| line.1.last().map_or(BOTTOM, |value| self.y(*value)))
            .collect();
        let mut order: Vec<usize> = (0..ends.len()).collect();
        order.sort_by(|a, b| ends[*a].total_cmp(&ends[*b]));
        let mut heights = ends.clone();
        let mut free = TOP;
        for at in &order {
            heights[*at] = ends[*at].max(free);
            free = heights[*at] + LABEL_HEIGHT;
        }
        // What was pushed out at the bottom goes up again.
        let mut free = BOTTOM;
        for at in order.iter().rev() {
            heights[*at] = heights[*at].min(free);
            free = heights[*at] - LABEL_HEIGHT;
        }
        heights
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 560.0;
const TOP: f64 = 70.0;
const BOTTOM: f64 = 345.0;
const LABEL_HEIGHT: f64 = 17.0;
/// Colours that differ for every kind of sight, and dashes.
const STYLES: [(&str, &str); 7] = [
    ("#0072b2", "none"),
    ("#1d2733", "2 5"),
    ("#d55e00", "none"),
    ("#6b7785", "none"),
    ("#a8508a", "none"),
    ("#b07900", "none"),
    ("#00795c", "none"),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> LineChart {
        LineChart {
            title: "a < b".to_owned(),
            x_name: "hosts".to_owned(),
            y_name: "s".to_owned(),
            points: vec!["1".to_owned(), "2".to_owned()],
            y_range: (1.0, 100.0),
            y_marks: vec![1.0, 10.0, 100.0],
            is_logarithmic: true,
            lines: vec![
                ("one".to_owned(), vec![10.0, 1e9]),
                ("two".to_owned(), vec![1.0, 1e9]),
                ("three".to_owned(), vec![1.0, 1.0]),
                ("four".to_owned(), vec![1.0, 1.0]),
            ],
        }
    }

    #[test]
    fn equal_ratios_are_equal_distances_and_values_stay_on_the_chart() {
        let chart = chart();
        assert!((chart.y(10.0) - f64::midpoint(chart.y(1.0), chart.y(100.0))).abs() < 1e-9);
        assert!((chart.y(1e9) - TOP).abs() < 1e-9);
        assert!((chart.y(0.0) - BOTTOM).abs() < 1e-9);
    }

    #[test]
    fn names_do_not_overlap_and_stay_beside_the_chart() {
        let mut heights = chart().label_heights();
        assert!(heights.iter().all(|y| (TOP..=BOTTOM).contains(y)), "{heights:?}");
        heights.sort_by(f64::total_cmp);
        for pair in heights.windows(2) {
            assert!(pair[1] - pair[0] >= LABEL_HEIGHT - 1e-9, "{heights:?}");
        }
    }

    #[test]
    fn the_file_names_every_line_and_escapes_text() {
        let svg = chart().svg();
        assert!(svg.contains("a &lt; b") && !svg.contains("a < b"));
        assert!(
            ["one", "two", "three", "four"]
                .iter()
                .all(|name| svg.contains(name))
        );
        assert!(chart().markdown().contains("| one | 10.0 | 1000000000.0 |"));
    }
}
